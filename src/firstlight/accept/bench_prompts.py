"""Owns the prompts of a load run: random token ids or real text, of the lengths asked for.

Knows nothing of endpoints; the same settings and salt always give the same prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from firstlight.accept.bench_settings import BenchSettings

CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `token_ids` is None for real text, whose length in tokens is an estimate.

    `text` stands in for the ids where an endpoint takes text only: about one word for each id.
    """

    text: str
    token_ids: tuple[int, ...] | None
    asked_tokens: int


def draw_lengths(settings: BenchSettings, count: int, salt: str) -> list[int]:
    """Draws `count` prompt lengths in tokens, each at least 1, with the mean asked for."""
    if settings.input_spread == 0:
        return [settings.input_tokens] * count
    source = random.Random(f"{settings.seed}/{salt}/lengths")
    mu = math.log(settings.input_tokens) - settings.input_spread**2 / 2
    return [max(1, round(source.lognormvariate(mu, settings.input_spread))) for _ in range(count)]


class PromptBuilder:
    """Builds prompts for a load; those of different salts differ, equal salts give equal ones."""

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self._text = reading_text()
        self._words = sorted(set(_plain_words(self._text)))

    def build(self, count: int, salt: str) -> list[Prompt]:
        """Builds `count` prompts; the first `shared_prefix` share of each is common to all."""
        lengths = draw_lengths(self._settings, count, salt)
        one = self._random if self._settings.prompts == "random" else self._real
        return [one(length, f"{salt}/{index}") for index, length in enumerate(lengths)]

    def _random(self, length: int, salt: str) -> Prompt:
        seed, (low, high) = self._settings.seed, self._settings.token_ids
        num_shared = round(length * self._settings.shared_prefix)
        shared, own = random.Random(f"{seed}/shared"), random.Random(f"{seed}/{salt}")
        ids = [shared.randrange(low, high) for _ in range(num_shared)]
        ids += [own.randrange(low, high) for _ in range(length - num_shared)]
        words = " ".join(self._words[i % len(self._words)] for i in ids)
        return Prompt(words, tuple(ids), length)

    def _real(self, length: int, salt: str) -> Prompt:
        num_characters = round(length * CHARACTERS_PER_TOKEN)
        num_shared = round(num_characters * self._settings.shared_prefix)
        start = random.Random(f"{self._settings.seed}/{salt}").randrange(len(self._text))
        own = islice(cycle(self._text[start:] + self._text[:start]), num_characters - num_shared)
        shared = islice(cycle(self._text), num_shared)
        return Prompt("".join(shared) + "".join(own), None, length)


def reading_text() -> str:
    """Returns the reference texts that ship with Python: about 465,000 characters of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(str(topics[name]) for name in sorted(topics))


def _plain_words(text: str) -> Iterator[str]:
    return (word for word in text.split() if word.isascii() and word.isalpha() and len(word) < 7)
