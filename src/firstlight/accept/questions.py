"""Owns a user's own questions to a service: asked in chat, told as lines and judged as answered.

Knows nothing of right answers: an answer that came, and holds text, is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from firstlight.accept.bench_load import find_model
from firstlight.accept.client import Endpoint
from firstlight.accept.report import Check, Report, Section
from firstlight.accept.smoke_exchanges import in_one_line
from firstlight.accept.smoke_service import Malformed, Refused, Reply, Service
from firstlight.errors import FirstlightError


def ask_questions(base_url: str, questions: Sequence[str], num_tokens: int) -> Report:
    """Asks each question greedily, up to `num_tokens` an answer; one without text fails."""
    return asyncio.run(_ask_all(base_url, questions, num_tokens))


async def _ask_all(base_url: str, questions: Sequence[str], num_tokens: int) -> Report:
    lines: list[str] = []
    checks: list[Check] = []
    answers: list[dict[str, Any]] = []
    async with Endpoint(base_url).open() as client:
        for question in questions:
            try:
                reply = await _ask(client, question, num_tokens)
            except (Refused, Malformed, FirstlightError) as problem:
                name = in_one_line(question)
                checks.append(Check(name, "fail", ascii(str(problem))[1:-1]))
                continue
            lines += _lines(question, reply)
            checks.append(_judge(question, reply))
            answers.append(_row(question, reply))
    section = Section("questions and answers", tuple(lines))
    return Report("ask", (section,) if lines else (), tuple(checks), {"answers": answers})


async def _ask(client: httpx.AsyncClient, question: str, num_tokens: int) -> Reply:
    service = Service(client, await find_model(client, ""), ("chat",))
    return await service.ask("chat", question, max_tokens=num_tokens)


def _lines(question: str, reply: Reply) -> Iterator[str]:
    yield f"Q: {in_one_line(question)}"
    if reply.reasoning:
        yield f"   reasoning: {reply.reasoning}"
    yield f"A: {reply.text}"


def _row(question: str, reply: Reply) -> dict[str, Any]:
    """The exchange as plain values, like those of smoke but for a verdict."""
    calls = [dict(call) for call in reply.calls]
    return {"prompt": question, "text": reply.text, "reasoning": reply.reasoning, "calls": calls}


def _judge(question: str, reply: Reply) -> Check:
    name = in_one_line(question)
    if reply.text.strip():
        return Check(name, "ok", in_one_line(reply.text))
    if reply.still_reasoning:
        detail = "the model was still reasoning at the token limit"
        return Check(name, "fail", detail, "allow longer answers")
    return Check(name, "fail", f"no text; finish_reason {reply.finish_reason}")
