"""Owns k3-mini's pictures: handwritten digits drawn large, and coloured shapes; and their answers.

It knows no token and no model. Digits are the UCI handwritten digits that scikit-learn carries.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image, ImageDraw

from firstlight.errors import EnvironmentProblem
from firstlight.training.recipes.k3_mini import words
from firstlight.training.recipes.k3_mini.configuration import IMAGE_SIDE

RGB = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 70, 230),
    "yellow": (235, 215, 30),
    "white": (250, 250, 250),
    "purple": (150, 40, 180),
}
HELD_OUT_DIGITS = 397  # the last ones of 1,797
_DIGIT_LEVELS = 16
_DRAW = 4  # shapes are drawn this much larger and shrunk, for smooth edges


@dataclass(frozen=True)
class Shown:
    """A picture, and what is true of it: answers by question."""

    image: Image.Image
    answers: dict[str, str]


@lru_cache(maxsize=1)
def digit_drawings() -> tuple[list[tuple[Image.Image, int]], list[tuple[Image.Image, int]]]:
    """Returns 8 x 8 drawings with their digits: (to learn from, held out)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentProblem(
            "handwritten digits come with scikit-learn, which is not installed; "
            'install it with: pip install "firstlight[train]"'
        ) from error
    data: Any = load_digits()
    drawings = []
    for levels, digit in zip(data.images, data.target, strict=True):
        pixels = (levels / _DIGIT_LEVELS * 255).astype("uint8")
        drawings.append((Image.fromarray(pixels), int(digit)))
    return drawings[:-HELD_OUT_DIGITS], drawings[-HELD_OUT_DIGITS:]


def draw_digit(draw: random.Random, drawing: Image.Image, digit: int, *, varied: bool) -> Shown:
    """Draws a digit on a dark ground; `varied` turns, stretches, shifts and dims it a little."""
    width = height = 48
    angle = shift_x = shift_y = 0.0
    brightness = 1.0
    if varied:
        width, height = draw.randint(40, 54), draw.randint(42, 54)
        angle = draw.uniform(-14, 14)
        shift_x, shift_y = draw.uniform(-4, 4), draw.uniform(-4, 4)
        brightness = draw.uniform(0.7, 1.0)
    large = drawing.resize((width, height), Image.Resampling.BICUBIC)
    if angle:
        large = large.rotate(angle, Image.Resampling.BICUBIC)
    canvas = Image.new("L", (IMAGE_SIDE, IMAGE_SIDE))
    left = round((IMAGE_SIDE - width) / 2 + shift_x)
    top = round((IMAGE_SIDE - height) / 2 + shift_y)
    canvas.paste(large.point([round(level * brightness) for level in range(256)]), (left, top))
    return Shown(canvas.convert("RGB"), {words.DIGIT: str(digit)})


def draw_shapes(draw: random.Random, count: int) -> Shown:
    """Draws `count` equal shapes of one colour on a dark ground; a single one has a place."""
    colour, shape = draw.choice(words.COLOURS), draw.choice(words.SHAPES)
    ground = draw.randint(0, 40)
    side = IMAGE_SIDE * _DRAW
    image = Image.new("RGB", (side, side), (ground, ground, ground))
    pen = ImageDraw.Draw(image)
    answers = {words.COLOUR: colour, words.SHAPE: shape, words.COUNT: str(count)}
    if count == 1:
        place = draw.choice(words.PLACES)
        answers[words.PLACE] = place
        centres = [_centre_at(draw, place)]
        radius = draw.uniform(9, 12)
    else:
        quarters = draw.sample([(x, y) for x in (15, 41) for y in (15, 41)], count)
        centres = [(x + draw.uniform(-3, 3), y + draw.uniform(-3, 3)) for x, y in quarters]
        radius = draw.uniform(8, 10)
    for x, y in centres:
        _draw_shape(pen, shape, (x * _DRAW, y * _DRAW), radius * _DRAW, RGB[colour])
    return Shown(image.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BOX), answers)


def _centre_at(draw: random.Random, place: str) -> tuple[float, float]:
    near, far = draw.uniform(12, 16), draw.uniform(40, 44)
    across = draw.uniform(25, 31)
    return {
        "left": (near, across),
        "right": (far, across),
        "top": (across, near),
        "bottom": (across, far),
    }[place]


def _draw_shape(
    pen: ImageDraw.ImageDraw,
    shape: str,
    centre: tuple[float, float],
    radius: float,
    colour: tuple[int, int, int],
) -> None:
    x, y = centre
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        half = radius * 0.88
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "triangle":
        corners = [
            (x + 1.15 * radius * math.sin(turn), y - 1.15 * radius * math.cos(turn))
            for turn in (0.0, 2 * math.pi / 3, 4 * math.pi / 3)
        ]
        pen.polygon(corners, fill=colour)
    else:
        bar = radius * 0.33
        pen.rectangle((x - radius, y - bar, x + radius, y + bar), fill=colour)
        pen.rectangle((x - bar, y - radius, x + bar, y + radius), fill=colour)
