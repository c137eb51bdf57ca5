"""Owns what a service may or may not be able to: images, reasoning told apart, tool calls.

Knows nothing of right answers; what a profile demands fails when it is missing, else it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from firstlight.accept.report import Check, Status
from firstlight.accept.samples import Profile, Sample
from firstlight.accept.smoke_answers import Answered
from firstlight.accept.smoke_protocol import stream_difference
from firstlight.accept.smoke_service import Refused, Reply, Service

IMAGES, REASONING, TOOLS = (
    "images are read",
    "reasoning is told apart",
    "tool calls are well-formed",
)
TOOL_QUESTION = 'How is the weather in "Lima"?'
WEATHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_STREAM_FIX = "same request, same seed, temperature 0: see what joins and parses the stream"
_THOUGHT_MARKS = ("<think>", "</think>")


async def check_images(service: Service, profile: Profile) -> Check | None:
    """Whether the service takes an image: `ok`, or text only; None when there is none to show."""
    sample = next((one for one in profile.samples if one.images), None)
    if sample is None or "chat" not in service.apis:
        return None
    try:
        await service.ask("chat", sample.prompt, **{**sample.options, "max_tokens": 1})
    except Refused as problem:
        said = ascii(str(problem))[1:-1]
        if problem.answer.status >= 500 and problem.answer.status != 501:
            return Check(IMAGES, "fail", said, "see the service's log")
        fix = "serve the vision part of the model, or choose a profile of text"
        return Check(IMAGES, _missing(profile, "images"), f"text only: {said}", fix)
    return Check(IMAGES, "ok", "a request with an image is accepted")


def judge_reasoning(profile: Profile, answered: Sequence[Answered]) -> Check:
    """Whether thoughts came in their own field and none of them in the content."""
    replied = [one for one in answered if one.reply and one.sample.api == "chat"]
    leaked = [one for one in replied if any(mark in one.text for mark in _THOUGHT_MARKS)]
    fix = "configure the parser of this model's reasoning"
    if leaked:
        status: Status = "fail" if "reasoning" in profile.demands else "warn"
        shown = f"{leaked[0].sample.name}: {leaked[0].text[:60]!a}"
        return Check(REASONING, status, f"{len(leaked)} answers hold it as text; {shown}", fix)
    num_thought = sum(bool(one.reply and one.reply.reasoning) for one in replied)
    if not num_thought:
        return Check(REASONING, _missing(profile, "reasoning"), "no answer came with any", fix)
    return Check(REASONING, "ok", f"{num_thought} of {len(replied)} answers came with theirs")


async def check_tools(service: Service, profile: Profile, max_tokens: int) -> Check:
    """Whether a question for a tool leads to a call that can be made, streamed as whole."""
    body = {"tools": [WEATHER_TOOL], "max_tokens": max_tokens}
    try:
        whole = await service.ask("chat", TOOL_QUESTION, **body)
        streamed = await service.ask_streaming("chat", TOOL_QUESTION, **body)
    except Refused as problem:
        said = f"tools are not offered: {ascii(str(problem))[1:-1]}"
        return Check(TOOLS, _missing(profile, "tools"), said, "offer tools in chat")
    if whole.still_reasoning and "tools" not in profile.demands:
        return Check(TOOLS, "unknown", "still reasoning at the token limit", "allow more tokens")
    if not whole.calls and not streamed.calls:
        said = f"answered without a call: {whole.text[:60]!a}"
        return Check(TOOLS, _missing(profile, "tools"), said, "check template and call parser")
    for reply in (whole, streamed):
        if problem_text := call_problem(reply):
            return Check(TOOLS, "fail", problem_text, "check the parser of this model's calls")
    if difference := stream_difference(whole, streamed):
        return Check(TOOLS, "fail", difference, _STREAM_FIX)
    call = whole.calls[0]
    return Check(TOOLS, "ok", f"{call['name']}({call['arguments']}), whole and streamed")


def call_problem(reply: Reply) -> str:
    """What is wrong with the calls of an answer to TOOL_QUESTION; empty when nothing is."""
    if not reply.calls:
        return "no call came"
    for call in reply.calls:
        if call["name"] != "get_weather":
            return f"a call of {call['name']!a}, which was not offered"
        try:
            arguments = msgspec.json.decode(call["arguments"])
        except msgspec.DecodeError:
            return f"arguments that are no JSON: {call['arguments'][:80]!a}"
        if not isinstance(arguments, dict) or not isinstance(arguments.get("city"), str):
            return f"arguments without a city: {json.dumps(arguments)[:80]}"
    if reply.finish_reason != "tool_calls":
        return f"finish_reason {reply.finish_reason!a}, not 'tool_calls'"
    return ""


def streamed_samples(profile: Profile, *, images: bool) -> Iterator[tuple[str, Sample]]:
    """One chat sample of each kind there is, with the kind's name."""
    chat = [one for one in profile.samples if one.api == "chat" and one.match != "any"]
    kinds = {
        "an answer": [one for one in chat if not (one.images or one.tools or one.effort)],
        "an answer without thinking": [one for one in chat if one.effort and not one.images],
        "an answer about an image": [one for one in chat if one.images and images],
        "a tool call": [one for one in chat if one.calls],
        "an answer after a tool": [one for one in chat if one.after],
    }
    for kind, found in kinds.items():
        if found:
            yield kind, found[0]


async def check_streamed(service: Service, kind: str, sample: Sample, max_tokens: int) -> Check:
    """A sample's streamed answer must be its whole one: reasoning, text, calls, reason, usage."""
    name = f"stream equals whole: {kind}"
    body = {**sample.options, "max_tokens": sample.max_tokens or max_tokens}
    whole = await service.ask("chat", sample.prompt, **body)
    streamed = await service.ask_streaming("chat", sample.prompt, **body)
    if difference := stream_difference(whole, streamed):
        return Check(name, "fail", difference, _STREAM_FIX)
    return Check(name, "ok", f"{sample.name}: {len(whole.told)} characters")


def _missing(profile: Profile, ability: str) -> Status:
    return "fail" if ability in profile.demands else "unknown"
