"""Owns how exchanges are told: as lines for people, as rows for programs.

Knows nothing of how they were judged beyond right, wrong and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from firstlight.accept.report import Section
from firstlight.accept.smoke_answers import Answered

_LONGEST = 100


def exchange_rows(answered: Sequence[Answered]) -> list[dict[str, object]]:
    """One row of plain values for each answer; `images` are names of bundled pictures."""
    return [
        {
            "sample": one.sample.name,
            "group": one.sample.group,
            "prompt": one.sample.prompt,
            "images": list(one.sample.images),
            "tools": bool(one.sample.tools),
            "tool_result": _tool_result(one),
            "shown": one.sample.shown,
            "text": one.text,
            "reasoning": one.reply.reasoning if one.reply else "",
            "calls": [dict(call) for call in one.reply.calls] if one.reply else [],
            "finish_reason": one.reply.finish_reason if one.reply else None,
            "right": None if one.undecided else not one.wrong,
            "problem": one.wrong,
        }
        for one in answered
    ]


def exchanges(answered: Sequence[Answered]) -> list[Section]:
    """The exchanges that a profile wants shown, as one section; none when there is none."""
    lines = [line for one in answered if one.sample.shown for line in _lines(one)]
    return [Section("what was asked", tuple(lines))] if lines else []


def _lines(one: Answered) -> Iterator[str]:
    images = "".join(f"[{name}] " for name in one.sample.images)
    yield f"Q: {images}{in_one_line(one.sample.prompt)}"
    if result := _tool_result(one):
        yield f"   tool result: {in_one_line(result)}"
    if one.reply is None:
        yield f"   no answer: {one.problem}"
        return
    if one.reply.reasoning:
        yield f"   reasoning: {in_one_line(one.reply.reasoning)}"
    for call in one.reply.calls:
        yield f"   call: {call['name']}({call['arguments']})"
    if one.text:
        yield f"A: {in_one_line(one.text)}"


def _tool_result(one: Answered) -> str:
    results = [message for message in one.sample.after if message.get("role") == "tool"]
    return _content(results[-1]) if results else ""


def _content(message: Mapping[str, object]) -> str:
    return str(message.get("content") or "")


def in_one_line(text: str) -> str:
    """A text in one line; of a long one its beginning and its end."""
    text = " / ".join(line for line in text.splitlines() if line)
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"
