"""Owns what k3-mini is judged by: examples from seeds and drawings it never learned from.

It knows no model. The same examples serve a quick look at predictions and questions to a service.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from firstlight.training.recipes.k3_mini import lookup, pictures, tasks, words
from firstlight.training.recipes.k3_mini.conversations import Conversation

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
TEXT_TASKS = ("reverse", "count words", "add")


def draw_of(name: str, index: int) -> random.Random:
    """The source of chance of one held-out example; no lesson uses these seeds."""
    return random.Random(f"held out {name} {index}")


def digits(*, thinking: bool) -> Iterator[Conversation]:
    """Each held-out drawing, once, as it is."""
    _, held_out = pictures.digit_drawings()
    for index, drawing in enumerate(held_out):
        yield tasks.digit(draw_of("digit", index), [drawing], thinking=thinking, varied=False)


def shapes(count: int, *, thinking: bool) -> Iterator[Conversation]:
    """Each question about shapes, `count` times, each time about another picture."""
    for asked in (words.COLOUR, words.SHAPE, words.PLACE, words.COUNT):
        for index in range(count):
            yield tasks.shapes(draw_of(asked, index), thinking=thinking, asked=asked)


def texts(count: int, *, thinking: bool) -> Iterator[Conversation]:
    """Each small text task and the tool, `count` times."""
    for name in TEXT_TASKS:
        for index in range(count):
            yield tasks.small_text(draw_of(name, index), name, thinking=thinking)
    for index in range(count):
        yield tasks.weather(draw_of("tool", index), thinking=thinking)


def lists(tokens: int, count: int, *, thinking: bool) -> Iterator[Conversation]:
    """One question about each of `count` lists of about that many tokens."""
    for index in range(count):
        task = f"lookup {tokens}"
        draw = draw_of(task, index)
        yield lookup.asked_list(draw, LISTS[tokens], thinking=thinking, task=task)
