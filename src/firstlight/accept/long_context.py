"""Owns the comparison of ways to attend over long contexts: what is asked, how it is counted.

Knows no model: whoever calls it hands in readers and questions, and gets rows back.

A question is a prompt and its one right answer; a text is scored by its perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from firstlight.accept.report import Check, Report, Section
from firstlight.errors import UsageError
from firstlight.settings.serve import KV_DTYPES
from firstlight.units import format_bytes


class Answer(Protocol):
    """Whether greedy decoding gives the right answer, minus the log-probability of the latter, and
    the seconds for the prompt and for each token of the answer.
    """

    @property
    def is_right(self) -> bool: ...
    @property
    def nats(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def token_seconds(self) -> float: ...


class Reader(Protocol):
    """Reads one sequence at a time in one way."""

    def cache_bytes(self, tokens: int) -> int:
        """What it holds for so many tokens."""
        ...

    def nats(self, tokens: Sequence[int]) -> float:
        """Minus the log-probability of the tokens behind the first, summed."""
        ...

    def ask(self, prompt: Sequence[int], answer: Sequence[int]) -> Answer:
        """How well a right answer follows its prompt, and the seconds it took."""
        ...


class Way(NamedTuple):
    """One way to attend: `attention` as `serve --attention` has it, and the caches' type."""

    name: str
    attention: str
    kv_dtype: str = "auto"


class Question(NamedTuple):
    """A prompt and the tokens of its right answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Material(NamedTuple):
    """What is asked at one length: questions, and texts to score, of which there may be none."""

    questions: tuple[Question, ...]
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Row:
    """What one way did at one length. Seconds are medians over the questions: for reading a prompt
    of about `length` tokens, and for one more token behind it.
    """

    way: Way
    length: int
    right: int
    asked: int
    answer_nats: float
    perplexity: float | None
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
    """Reads ways with `|` between them, each an `--attention` text, with `int8` or `fp8` in front
    for such caches, as in `full | int8 full | window=4096,sinks=4`. Raises UsageError for an empty
    one.
    """
    ways = []
    for part in (piece.strip() for piece in text.split("|")):
        kv_dtype = next((name for name in KV_DTYPES if part.startswith(name)), "auto")
        words = part.removeprefix(kv_dtype).strip()
        if not words:
            raise UsageError(
                f"--ways {text!r}: {part!r} names no attention; write full | int8 full"
            )
        ways.append(Way(part, words, kv_dtype))
    return tuple(ways)


def compare(
    ways: Sequence[Way], material: Mapping[int, Material], make_reader: Callable[[Way], Reader]
) -> Iterator[Row]:
    """Yields a row for each length and way, the shortest length first; the same material for all
    ways of a length.
    """
    for length in sorted(material):
        for way in ways:
            yield _row(way, length, material[length], make_reader(way))


def _row(way: Way, length: int, asked: Material, reader: Reader) -> Row:
    answers = [reader.ask(question.prompt, question.answer) for question in asked.questions]
    scored = sum(len(text) - 1 for text in asked.texts)
    total = sum(reader.nats(text) for text in asked.texts)
    return Row(
        way=way,
        length=length,
        right=sum(answer.is_right for answer in answers),
        asked=len(answers),
        answer_nats=sum(a.nats for a in answers) / sum(len(q.answer) for q in asked.questions),
        perplexity=math.exp(total / scored) if scored else None,
        seconds=median(answer.seconds for answer in answers),
        token_seconds=median(answer.token_seconds for answer in answers),
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
    broken = [row for row in rows if not math.isfinite(row.answer_nats)]
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
        f"{row.right} of {row.asked}",
        row.answer_nats,
        row.perplexity,
        against,
        format_bytes(row.cache_bytes),
        f"{row.seconds:.2f} s",
        f"{1e3 * row.token_seconds:.1f} ms",
    )
