"""Owns what k3-mini is judged by: examples from seeds, pictures and writers it never learned from.

It knows no model. The same examples serve a quick look at predictions and questions to a service.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from firstlight.inputs.images.preprocess_settings import PreprocessSettings
from firstlight.inputs.kimi_k3.encoder import EncoderOptions
from firstlight.training.examples import Example
from firstlight.training.recipes.k3_mini import lookup, pictures, tasks, words
from firstlight.training.recipes.k3_mini.conversations import Renderer

# Tokens of a list: its pairs and lines of filler.
LISTS: Mapping[int, lookup.ListSize] = {
    64: lookup.ListSize(16),
    256: lookup.ListSize(64),
    512: lookup.ListSize(128),
    1024: lookup.ListSize(256),
    4096: lookup.ListSize(256, (4096 - 1024) // lookup.TOKENS_OF_FILLER),
    16384: lookup.ListSize(256, (16384 - 1024) // lookup.TOKENS_OF_FILLER),
    65536: lookup.ListSize(256, (65000 - 1024) // lookup.TOKENS_OF_FILLER),
}
TEXT_TASKS = ("reverse", "count words", "upper", "add")


def draw_of(name: str, index: int) -> random.Random:
    """The source of chance of one held-out example; no lesson uses these seeds."""
    return random.Random(f"held out {name} {index}")


def digit_examples(
    renderer: Renderer, settings: PreprocessSettings, *, thinking: bool
) -> Iterator[Example]:
    """Each drawing of a held-out writer, once, as it is."""
    _, held_out = pictures.digit_drawings()
    for index, drawing in enumerate(held_out):
        draw = draw_of("digit", index)
        yield tasks.digit(renderer, draw, thinking, settings, [drawing], varied=False)


def shape_examples(
    renderer: Renderer, settings: PreprocessSettings, count: int, *, thinking: bool
) -> Iterator[Example]:
    """Each question about shapes, `count` times, each time about another picture."""
    for asked in (words.COLOUR, words.SHAPE, words.PLACE, words.COUNT):
        for index in range(count):
            draw = draw_of(asked, index)
            yield tasks.shapes(renderer, draw, thinking, settings, asked=asked)


def text_examples(renderer: Renderer, count: int, *, thinking: bool) -> Iterator[Example]:
    """Each small text task and the tool, `count` times."""
    for name in TEXT_TASKS:
        for index in range(count):
            yield tasks.small_text(renderer, draw_of(name, index), thinking, name)
    for index in range(count):
        yield tasks.weather(renderer, draw_of("tool", index), thinking)


def lookup_examples(
    renderer: Renderer, tokens: int, count: int, *, thinking: bool
) -> Iterator[Example]:
    """One question about each of `count` lists of about that many tokens."""
    for index in range(count):
        draw = draw_of(f"lookup {tokens}", index)
        options = EncoderOptions(thinking=thinking)
        yield lookup.asked_list(renderer, draw, LISTS[tokens], options)
