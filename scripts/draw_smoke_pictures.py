"""Draws the pictures of the smoke profile for models nothing is known about.

Usage: python scripts/draw_smoke_pictures.py
Large plain shapes and digits on white, 224 x 224: what any model that sees can name. The same
Pillow draws the same bytes. Writes beside firstlight.accept.
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import firstlight.accept

FOLDER = Path(firstlight.accept.__file__).parent / "pictures"
SIDE, EDGE = 224, 40
RGB = {"red": (220, 20, 20), "blue": (20, 60, 220), "green": (20, 160, 60)}
SHAPES = (("red", "circle"), ("blue", "square"), ("green", "triangle"))
DIGITS = (4, 7)


def shape(colour: str, form: str) -> Image.Image:
    """One large shape on white."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    box = (EDGE, EDGE, SIDE - EDGE, SIDE - EDGE)
    if form == "circle":
        pen.ellipse(box, fill=RGB[colour])
    elif form == "square":
        pen.rectangle(box, fill=RGB[colour])
    else:
        corners = [(SIDE / 2, EDGE), (EDGE, SIDE - EDGE), (SIDE - EDGE, SIDE - EDGE)]
        pen.polygon(corners, fill=RGB[colour])
    return image


def digit(number: int) -> Image.Image:
    """One large digit on white."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    font = ImageFont.load_default(size=180)
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), str(number), "black", font, anchor="mm")
    return image


def main() -> None:
    """Draws them all."""
    FOLDER.mkdir(exist_ok=True)
    for colour, form in SHAPES:
        shape(colour, form).save(FOLDER / f"any-{colour}-{form}.png", "PNG", optimize=True)
    for number in DIGITS:
        digit(number).save(FOLDER / f"any-digit-{number}.png", "PNG", optimize=True)


if __name__ == "__main__":
    main()
