"""Owns key lookup: lists of `key=value` and questions about them, as plain text or conversation.

It knows tokens of words and no model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from firstlight.training.examples import Example
from firstlight.training.recipes.k3_mini import words
from firstlight.training.recipes.k3_mini.conversations import (
    Conversation,
    Renderer,
    answer,
    question,
)

TOKENS_OF_PAIR = 4  # key, sign, value, line end
FILLER_NUMBERS = 10
TOKENS_OF_FILLER = 2 * FILLER_NUMBERS + 1


@dataclass(frozen=True)
class ListSize:
    """Pairs of a list, lines of filler among them, and questions asked about it."""

    pairs: int
    filler: int = 0
    turns: int = 1


def draw_pairs(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """Returns `count` names, each once, with numbers, which may repeat."""
    return [
        (name, str(draw.randint(0, words.LARGEST_NUMBER)))
        for name in draw.sample(words.NAMES, count)
    ]


def repeated_list(renderer: Renderer, draw: random.Random, count: int) -> Example:
    """The list, then all its lines again in another order, of which the values count."""
    pairs = draw_pairs(draw, count)
    again = draw.sample(pairs, count)
    single = renderer.single
    end, sign = single("\n"), single("=")
    tokens: list[int] = []
    for name, number in pairs:
        tokens += (single(name), sign, single(number), end)
    tokens += renderer.encode("\n\n")
    counts = [False] * len(tokens)
    for name, number in again:
        tokens += (single(name), sign, single(number), end)
        counts += (False, False, True, False)
    return Example("list", tuple(tokens), tuple(counts))


def asked_list(
    draw: random.Random, size: ListSize, *, thinking: bool, task: str = "lookup"
) -> Conversation:
    """A conversation about a list: the first question follows it, further turns ask again."""
    pairs = draw_pairs(draw, size.pairs)
    lines = [f"{name}={number}" for name, number in pairs]
    for _ in range(size.filler):
        lines.insert(draw.randint(0, len(lines)), filler_line(draw))
    listed = "\n".join(lines)
    messages = []
    for turn, (name, number) in enumerate(draw.sample(pairs, min(size.turns, size.pairs))):
        asked = words.WHAT_IS.format(key=name)
        messages.append(question(f"{listed}\n\n{asked}" if turn == 0 else asked))
        thought = f"{name}={number}"
        messages.append(answer(number, thought) if thinking else answer(thought))
    return Conversation(task, messages, thinking)


def filler_line(draw: random.Random) -> str:
    """A line that answers nothing: numbers behind a sign, TOKENS_OF_FILLER tokens."""
    numbers = (str(draw.randint(0, words.LARGEST_NUMBER)) for _ in range(FILLER_NUMBERS))
    return "#" + ",".join(numbers)
