"""Owns asking a service in either interface and reading its replies into one record.

Knows nothing of what a right answer is; a reply of the wrong shape raises Malformed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from firstlight.accept.client import (
    PATHS,
    Answer,
    Api,
    BrokenStream,
    StreamRefused,
    post,
    stream,
)

ABSENT_STATUSES = (404, 405, 501)


class Malformed(Exception):
    """A reply with status 200 does not have the shape the protocol asks for."""


class Refused(Exception):
    """The service answered a good request with an error status."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}: {answer.error_message}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the service reports them."""

    prompt: int
    completion: int
    total: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; `pieces` are the streamed parts of its text, empty when it came whole.

    `calls` hold `name` and `arguments` of each tool call, the arguments as they came.
    """

    text: str
    reasoning: str
    finish_reason: str
    usage: Usage | None
    choices: tuple[Mapping[str, Any], ...]
    pieces: tuple[str, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()

    @property
    def still_reasoning(self) -> bool:
        """Whether the token limit came before the reasoning ended."""
        return not self.text.strip() and bool(self.reasoning) and self.finish_reason == "length"

    @property
    def told(self) -> str:
        """All of the answer that depends on the prompt: reasoning, calls and text."""
        calls = "".join(f"{call['name']}({call['arguments']})" for call in self.calls)
        return self.reasoning + calls + self.text


@dataclass(frozen=True, slots=True)
class Service:
    """A service, the model asked for, and the interfaces it offers."""

    client: httpx.AsyncClient
    model: str
    apis: tuple[Api, ...]

    @property
    def main_api(self) -> Api:
        """The interface used where either will do: plain text when there is one."""
        return "completions" if "completions" in self.apis else "chat"

    def body(self, api: Api, prompt: str, **options: Any) -> dict[str, Any]:
        """A greedy request; options replace or add fields."""
        asked: dict[str, Any] = {"model": self.model, "temperature": 0, "seed": 0}
        if api == "chat":
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        return {**asked, **options}

    async def ask(self, api: Api, prompt: str, **options: Any) -> Reply:
        """Asks for a whole answer; raises Refused on an error status, Malformed on a bad shape."""
        answer = await post(self.client, PATHS[api], self.body(api, prompt, **options))
        return read_reply(answer, api)

    async def ask_streaming(self, api: Api, prompt: str, **options: Any) -> Reply:
        """Asks for a streamed answer and joins it; raises as `ask`, and BrokenStream."""
        options = {"stream": True, "stream_options": {"include_usage": True}, **options}
        reading = _Reading()
        events = stream(self.client, PATHS[api], self.body(api, prompt, **options))
        try:
            async with aclosing(events):
                async for event in events:
                    if not event.is_done:
                        reading.take(event.parse())
        except StreamRefused as problem:
            raise Refused(problem.answer) from problem
        return reading.reply()

    async def leave_early(self, api: Api, prompt: str, num_events: int, **options: Any) -> int:
        """Streams, drops the connection after `num_events` events; returns how many came."""
        events = stream(self.client, PATHS[api], self.body(api, prompt, stream=True, **options))
        count = 0
        async with aclosing(events):
            async for _ in events:
                count += 1
                if count == num_events:
                    break
        return count


async def find_apis(client: httpx.AsyncClient, model: str) -> dict[Api, Answer]:
    """Asks each interface for one token and returns the answers."""
    service = Service(client, model, ())
    found: dict[Api, Answer] = {}
    for api in ("chat", "completions"):
        body = service.body(api, "Hello", max_tokens=1)
        found[api] = await post(client, PATHS[api], body)
    return found


def read_reply(answer: Answer, api: Api) -> Reply:
    """Reads a whole answer; raises Refused on an error status and Malformed on a bad shape."""
    if answer.status != 200:
        raise Refused(answer)
    if not isinstance(answer.body, dict):
        raise Malformed(f"the body is no JSON object: {answer.text[:120]!r}")
    choices = _choices(answer.body)
    if not choices:
        raise Malformed("the answer has no choices")
    text, reasoning = _whole_text(choices[0], api)
    calls = _calls(choices[0].get("message")) if api == "chat" else ()
    reason = choices[0].get("finish_reason")
    if not isinstance(reason, str):
        raise Malformed(f"finish_reason is {reason!r}, not a word")
    return Reply(text, reasoning, reason, _usage(answer.body), choices, calls=calls)


def _whole_text(choice: Mapping[str, Any], api: Api) -> tuple[str, str]:
    if api == "completions":
        text = choice.get("text")
        if not isinstance(text, str):
            raise Malformed("choices[0].text is no string")
        return text, ""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise Malformed("choices[0].message is no object")
    content, reasoning = message.get("content"), _reasoning(message)
    if not isinstance(content, (str, type(None))):
        raise Malformed("choices[0].message.content is neither a string nor null")
    return content or "", reasoning


def _reasoning(part: Mapping[str, Any]) -> str:
    value = part.get("reasoning_content") or part.get("reasoning")
    return value if isinstance(value, str) else ""


def _calls(message: Any) -> tuple[Mapping[str, Any], ...]:
    joined: dict[int, dict[str, str]] = {}
    _join_calls(joined, message, whole=True)
    return tuple(joined[index] for index in sorted(joined))


def _join_calls(joined: dict[int, dict[str, str]], part: Any, *, whole: bool) -> None:
    """Adds the calls, or pieces of calls, that a message or a delta carries."""
    calls = part.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Malformed("tool_calls is no list of objects")
    for number, call in enumerate(calls):
        function, index = call.get("function"), number if whole else call.get("index")
        if not isinstance(function, dict) or not isinstance(index, int):
            raise Malformed(f"a tool call without function or index: {json.dumps(call)[:120]}")
        one = joined.setdefault(index, {"name": "", "arguments": ""})
        for name in one:
            piece = function.get(name) or ""
            if not isinstance(piece, str):
                raise Malformed(f"the {name} of a tool call is no string")
            one[name] += piece


def _choices(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Malformed("choices is no list of objects")
    return tuple(choices)


def _usage(body: Mapping[str, Any]) -> Usage | None:
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = [usage.get(name) for name in names]
    if not all(isinstance(count, int) for count in counts):
        raise Malformed(f"usage lacks whole numbers: {json.dumps(usage)[:120]}")
    return Usage(*(int(count) for count in counts if count is not None))


@dataclass(slots=True)
class _Reading:
    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        if event.get("error"):
            raise BrokenStream(f"the stream carried an error: {str(event['error'])[:160]}")
        self.usage = _usage(event) or self.usage
        for choice in _choices(event):
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content") or ""
            if not isinstance(piece, str):
                raise Malformed("a streamed piece is no string")
            self.pieces += [piece] if piece else []
            self.reasoning.append(_reasoning(delta))
            _join_calls(self.calls, delta, whole=False)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def reply(self) -> Reply:
        text, reasoning = "".join(self.pieces), "".join(self.reasoning)
        calls = tuple(self.calls[index] for index in sorted(self.calls))
        pieces = tuple(self.pieces)
        return Reply(text, reasoning, self.finish_reason, self.usage, (), pieces, calls)
