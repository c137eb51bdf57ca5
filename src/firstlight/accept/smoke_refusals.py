"""Owns the requests that must be refused and what a proper refusal looks like.

Knows nothing of models or answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.accept.client import PATHS, Answer, Api, post, post_bytes
from firstlight.accept.report import Check
from firstlight.accept.smoke_service import Service

_GOOD_PROMPT = "Hello"
_FIX = 'answer with status 400 to 499 and {"error": {"message": ..., "type": ...}}'


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request that is wrong in one way: fields replaced, or removed where the value is None."""

    name: str
    api: Api
    changes: Mapping[str, Any]


BAD_REQUESTS: tuple[BadRequest, ...] = (
    BadRequest("unknown model", "chat", {"model": "no-such-model-on-this-service"}),
    BadRequest("unknown model", "completions", {"model": "no-such-model-on-this-service"}),
    BadRequest("empty messages", "chat", {"messages": []}),
    BadRequest("messages of the wrong type", "chat", {"messages": "hello"}),
    BadRequest("messages missing", "chat", {"messages": None}),
    BadRequest("prompt missing", "completions", {"prompt": None}),
    BadRequest("prompt of the wrong type", "completions", {"prompt": {"text": "hello"}}),
    BadRequest("negative max_tokens", "chat", {"max_tokens": -1}),
    BadRequest("negative max_tokens", "completions", {"max_tokens": -1}),
    BadRequest("temperature of the wrong type", "chat", {"temperature": "hot"}),
    BadRequest("temperature of the wrong type", "completions", {"temperature": "hot"}),
)


async def check_refusals(service: Service) -> tuple[Check, ...]:
    """Sends every bad request the offered interfaces allow, and one body that is no JSON."""
    checks = [await _check(service, bad) for bad in BAD_REQUESTS if bad.api in service.apis]
    checks.append(await _check_broken_json(service))
    return tuple(checks)


async def _check(service: Service, bad: BadRequest) -> Check:
    body = {**service.body(bad.api, _GOOD_PROMPT, max_tokens=1), **bad.changes}
    sent = {name: value for name, value in body.items() if value is not None}
    answer = await post(service.client, PATHS[bad.api], sent)
    return _judge(f"refused: {bad.name} ({bad.api})", answer)


async def _check_broken_json(service: Service) -> Check:
    answer = await post_bytes(service.client, PATHS[service.main_api], b'{"model": ')
    return _judge("refused: a body that is no JSON", answer)


def _judge(name: str, answer: Answer) -> Check:
    problem = refusal_problem(answer)
    if problem:
        return Check(name, "fail", problem, _FIX)
    return Check(name, "ok", f"HTTP {answer.status}: {ascii(answer.error_message)[1:-1][:100]}")


def refusal_problem(answer: Answer) -> str:
    """What is wrong with a refusal, in words; empty when it is a proper one."""
    if not 400 <= answer.status < 500:
        return f"status {answer.status} instead of 400 to 499"
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    if not isinstance(error, dict):
        return f"HTTP {answer.status}, but the body holds no error object: {answer.text[:80]!a}"
    if not isinstance(error.get("message"), str) or not error["message"].strip():
        return f"HTTP {answer.status}, but the error has no message"
    if "type" not in error:
        return f"HTTP {answer.status}, but the error has no type"
    return ""
