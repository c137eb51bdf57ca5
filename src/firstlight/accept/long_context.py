"""Owns the comparison of ways to attend over long contexts: what is asked, how it is counted.

Knows no model: whoever calls it hands in readers and questions, and gets rows back.

A question is a prompt and its one right answer; a text is scored by its perplexity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from firstlight.accept.report import Check, Report, Section
from firstlight.errors import UsageError
from firstlight.units import format_bytes

DECODED = 8  # tokens whose time is taken


class Reader(Protocol):
    """Reads one sequence at a time in one way."""

    def cache_bytes(self, tokens: int) -> int:
        """What it holds for so many tokens."""
        ...

    def nats(self, tokens: Sequence[int], first: int = 0) -> float:
        """Minus the log-probability of the tokens behind position `first`, summed."""
        ...

    def answer(self, prompt: Sequence[int], most: int, stops: Sequence[int]) -> list[int]:
        """The likeliest tokens behind a prompt."""
        ...


class Way(NamedTuple):
    """One way to attend: `attention` as `serve --attention` has it, and the caches' type."""

    name: str
    attention: str
    kv_dtype: str = "auto"


class Question(NamedTuple):
    """A prompt and the tokens of its right answer; `stops` end one."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    stops: tuple[int, ...]


class Material(NamedTuple):
    """What is asked at one length: questions, and texts to score (both may be empty)."""

    questions: tuple[Question, ...]
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Row:
    """What one way did at one length. `seconds` are those of reading a prompt of `prompt_tokens`;
    `token_seconds` those of one more token behind it.
    """

    way: Way
    length: int
    right: int
    asked: int
    answer_nats: float | None
    perplexity: float | None
    prompt_tokens: int
    seconds: float
    token_seconds: float
    cache_bytes: int


def default_ways(length: int) -> tuple[Way, ...]:
    """Full attention first, then a window with sinks, chosen blocks, and INT8 caches, sized so
    that both shorter ways read an eighth of the longest context or 4,096 tokens.
    """
    tokens = max(512, min(4096, length // 8 // 64 * 64))
    return (
        Way("full", "full"),
        Way("window", f"window={tokens},sinks=64"),
        Way("sparse", f"sparse=16x{(tokens - 320) // 16},recent=256,sinks=64"),
        Way("int8", "full", "int8"),
    )


def parse_ways(text: str) -> tuple[Way, ...]:
    """Reads ways with `|` between them, each an `--attention` text, with `int8` in front for INT8
    caches, as in `full | int8 full | window=4096,sinks=4`. Raises UsageError for an empty one.
    """
    ways = []
    for part in (piece.strip() for piece in text.split("|")):
        words = part.removeprefix("int8").strip()
        if not words:
            raise UsageError(
                f"--ways {text!r}: {part!r} names no attention; write full | int8 full"
            )
        ways.append(Way(part, words, "int8" if part.startswith("int8") else "auto"))
    return tuple(ways)


def compare(
    ways: Sequence[Way],
    material: Mapping[int, Material],
    make_reader: Callable[[Way], Reader],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """Yields a row for each length and way, the shortest length first; the same material for all
    ways of a length.
    """
    for length in sorted(material):
        for way in ways:
            yield _row(way, length, material[length], make_reader(way), clock)


def _row(way: Way, length: int, asked: Material, reader: Reader, clock: Callable[[], float]) -> Row:
    right, nats, count = 0, 0.0, 0
    for question in asked.questions:
        found = reader.answer(question.prompt, len(question.answer), question.stops)
        right += tuple(found) == question.answer
        whole = (*question.prompt, *question.answer)
        nats += reader.nats(whole, len(question.prompt) - 1)
        count += len(question.answer)
    scored = sum(len(text) - 1 for text in asked.texts)
    total = sum(reader.nats(text) for text in asked.texts)
    prompt = (asked.questions[0].prompt if asked.questions else asked.texts[0])[:length]
    began = clock()
    reader.answer(prompt, 0, ())
    read = clock()
    reader.answer(prompt, DECODED, ())
    seconds = read - began
    return Row(
        way=way,
        length=length,
        right=right,
        asked=len(asked.questions),
        answer_nats=nats / count if count else None,
        perplexity=math.exp(total / scored) if scored else None,
        prompt_tokens=len(prompt),
        seconds=seconds,
        token_seconds=max(0.0, clock() - read - seconds) / DECODED,
        cache_bytes=reader.cache_bytes(length),
    )


def long_context_report(model: str, rows: Sequence[Row], source: str) -> Report:
    """Turns rows into the report the command shows; `source` says what was asked."""
    columns = ("context", "attention", "caches", "right", "nats a token", "perplexity",
               "against full", "cache", "read", "a token")  # fmt: skip
    table = tuple(_cells(row, _full(rows, row.length)) for row in rows)
    lines = (f"model: {model}", source, "one sequence, greedy; times of one run on this machine")
    data = {
        "model": model,
        "source": source,
        "rows": [
            {**{name: getattr(row, name) for name in row.__dataclass_fields__ if name != "way"},
             "way": row.way.name, "attention": row.way.attention, "kv_dtype": row.way.kv_dtype}
            for row in rows
        ],
    }  # fmt: skip
    broken = [row for row in rows if row.answer_nats is not None and math.isnan(row.answer_nats)]
    status: Check = Check("every way gives finite numbers", "fail" if broken else "ok")
    section = Section("quality and time by context", lines, columns=columns, rows=table)
    return Report("firstlight bench long-context", (section,), (status,), data)


def _full(rows: Sequence[Row], length: int) -> Row | None:
    found = (row for row in rows if row.length == length and row.way == Way("full", "full"))
    return next(found, None)


def _cells(row: Row, full: Row | None) -> tuple[str | float | int | None, ...]:
    against = None
    if row.perplexity is not None and full is not None and full.perplexity is not None:
        against = f"{row.perplexity / full.perplexity - 1:+.2%}"
    return (
        row.length,
        row.way.attention,
        "float32" if row.way.kv_dtype == "auto" else row.way.kv_dtype,
        f"{row.right} of {row.asked}" if row.asked else None,
        row.answer_nats,
        row.perplexity,
        against,
        format_bytes(row.cache_bytes),
        f"{row.seconds:.2f} s",
        f"{1e3 * row.token_seconds:.1f} ms",
    )
