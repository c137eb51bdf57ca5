"""Owns the checks that need no ability of the model: the service is held against its own answers.

Knows nothing of what a right answer would be.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from firstlight.accept.client import PATHS, Api, post_bytes
from firstlight.accept.report import Check
from firstlight.accept.smoke_service import Refused, Reply, Service, read_reply

COUNTING: Mapping[str, str] = {
    "chat": "Count from 1 to 40.",
    "completions": "1, 2, 3, 4, 5, 6,",
}
UNICODE_TEXT = "caf\u00e9 na\u00efve \u6771\u4eac \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f680"
SUBJECTS = ("rivers", "bread", "clocks", "winter", "bees", "bridges", "paper", "salt")
NUM_ALTERNATIVES = 3
ProtocolCheck = Callable[[Service], Awaitable[Check]]


async def check_stream(service: Service, api: Api) -> Check:
    """A streamed answer must be the whole answer: text, finish reason and usage."""
    name = f"stream equals whole ({api})"
    whole = await service.ask(api, COUNTING[api], max_tokens=32)
    streamed = await service.ask_streaming(api, COUNTING[api], max_tokens=32)
    if difference := stream_difference(whole, streamed):
        fix = "same request, same seed, temperature 0: see detokenizer"
        return Check(name, "fail", difference, fix)
    return Check(name, "ok", f"{len(whole.text)} characters in {len(streamed.pieces)} pieces")


def stream_difference(whole: Reply, streamed: Reply) -> str:
    """What of a streamed answer is not as in the whole one; empty when nothing differs."""
    for part in ("text", "reasoning", "calls", "finish_reason"):
        one, other = getattr(whole, part), getattr(streamed, part)
        if one != other:
            return f"{part}: whole {one!a}, streamed {other!a}"
    if streamed.usage is not None and streamed.usage != whole.usage:
        return f"usage: whole {whole.usage}, streamed {streamed.usage}"
    return ""


async def check_stop(service: Service) -> Check:
    """A stop string cut out of the service's own answer must end that answer before it."""
    name, api = "stop strings are honoured", service.main_api
    free = await service.ask(api, COUNTING[api], max_tokens=32)
    stop = pick_stop(free.text)
    if stop is None:
        return Check(name, "unknown", f"no stop string can be cut out of {free.text!a}")
    wanted = free.text[: free.text.index(stop)]
    for ask, way in ((service.ask, "whole"), (service.ask_streaming, "streamed")):
        reply = await ask(api, COUNTING[api], max_tokens=32, stop=[stop])
        if reply.text != wanted:
            detail = f"{way}, stop {stop!a}: got {reply.text!a}, expected {wanted!a}"
            return Check(
                name, "fail", detail, "end before the first occurrence, also across tokens"
            )
        if reply.finish_reason != "stop":
            return Check(name, "fail", f"{way}: finish_reason {reply.finish_reason!a}, not 'stop'")
    return Check(name, "ok", f"stop {stop!a}, whole and streamed")


def pick_stop(text: str) -> str | None:
    """Picks three characters of a text that first occur neither at its start nor at its end."""
    for start in range(len(text) // 2, len(text) - 3):
        stop = text[start : start + 3]
        if stop.strip() and 0 < text.index(stop) < len(text) - 3:
            return stop
    return None


async def check_max_tokens(service: Service) -> Check:
    """An answer may not be longer than max_tokens, and must say that it was cut."""
    name, api = "max_tokens is honoured", service.main_api
    for limit in (1, 6):
        reply = await service.ask(api, COUNTING[api], max_tokens=limit)
        if reply.usage is None:
            return Check(name, "fail", "no usage, so the length cannot be checked", "send usage")
        count = reply.usage.completion
        if count > limit:
            return Check(name, "fail", f"{count} tokens where max_tokens is {limit}")
        if count < limit and reply.finish_reason == "stop":
            return Check(name, "unknown", f"the answer ended itself after {count} tokens")
        if count < limit or reply.finish_reason != "length":
            detail = f"{count} of {limit} tokens with finish_reason {reply.finish_reason!a}"
            return Check(name, "fail", detail, "finish_reason is 'length' when max_tokens ends it")
    return Check(name, "ok", "1 and 6 tokens, finish_reason 'length'")


async def check_usage(service: Service) -> Check:
    """Token counts must add up, be the same when asked again, and grow with the prompt."""
    name, api = "usage adds up", service.main_api
    short = await service.ask(api, "one two three", max_tokens=4)
    again = await service.ask(api, "one two three", max_tokens=4)
    longer = await service.ask(api, "one two three four five six seven eight", max_tokens=4)
    if short.usage is None or again.usage is None or longer.usage is None:
        return Check(name, "fail", "the answer carries no usage")
    for usage in (short.usage, longer.usage):
        if usage.prompt < 1 or usage.completion < 0:
            return Check(name, "fail", f"counts out of range: {usage}")
        if usage.prompt + usage.completion != usage.total:
            return Check(name, "fail", f"{usage.prompt} + {usage.completion} is not {usage.total}")
    if short.usage != again.usage:
        return Check(name, "fail", f"the same request counted {short.usage}, then {again.usage}")
    if longer.usage.prompt <= short.usage.prompt:
        return Check(name, "fail", "a longer prompt has no more prompt tokens than a short one")
    return Check(name, "ok", f"{short.usage.prompt} and {longer.usage.prompt} prompt tokens")


async def check_logprobs(service: Service) -> Check:
    """Log-probabilities must be finite, <= 0, sum to at most 1 and agree with the choice."""
    name, api = "logprobs are sound", service.main_api
    asked: dict[str, Any] = {"logprobs": NUM_ALTERNATIVES}
    if api == "chat":
        asked = {"logprobs": True, "top_logprobs": NUM_ALTERNATIVES}
    try:
        reply = await service.ask(api, COUNTING[api], max_tokens=6, **asked)
    except Refused as problem:
        return Check(name, "warn", f"refused: {problem}", "allow logprobs to have them checked")
    problem_text = logprobs_problem(reply, api)
    if problem_text:
        return Check(name, "fail", problem_text)
    return Check(name, "ok", f"top {NUM_ALTERNATIVES} of every token")


def logprobs_problem(reply: Reply, api: Api) -> str:
    """What is wrong with the log-probabilities of a greedy reply; empty when nothing is."""
    block = reply.choices[0].get("logprobs")
    if not isinstance(block, dict):
        return f"choices[0].logprobs is {block!a}, not an object"
    rows = _chat_rows(block) if api == "chat" else _completion_rows(block)
    if rows is None:
        return f"unexpected shape: {json.dumps(block)[:160]}"
    count = reply.usage.completion if reply.usage else len(rows)
    if not rows or abs(len(rows) - count) > 1:
        return f"{len(rows)} entries for {count} tokens"
    for index, (chosen, top) in enumerate(rows):
        values = [chosen, *top]
        if not all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
            return f"token {index}: not finite: {values}"
        if max(values) > 1e-4:
            return f"token {index}: above 0: {values}"
        if sum(math.exp(v) for v in top) > 1.001:
            return f"token {index}: the probabilities sum to {sum(math.exp(v) for v in top):.4f}"
        if top and chosen < max(top) - 1e-3:
            return f"token {index}: greedy chose {chosen:.4f} where {max(top):.4f} was on offer"
    return ""


def _chat_rows(block: Mapping[str, Any]) -> list[tuple[float, list[float]]] | None:
    try:
        return [
            (entry["logprob"], [other["logprob"] for other in entry["top_logprobs"]])
            for entry in block["content"]
        ]
    except (KeyError, TypeError):
        return None


def _completion_rows(block: Mapping[str, Any]) -> list[tuple[float, list[float]]] | None:
    try:
        chosen, top, tokens = block["token_logprobs"], block["top_logprobs"], block["tokens"]
        if not len(chosen) == len(top) == len(tokens):
            return None
        return [(c, list(t.values())) for c, t in zip(chosen, top, strict=True)]
    except (KeyError, TypeError, AttributeError):
        return None


async def check_choices(service: Service) -> Check:
    """`n` = 2 must give two choices, numbered 0 and 1."""
    name, api = "n = 2 gives two answers", service.main_api
    try:
        reply = await service.ask(api, COUNTING[api], max_tokens=4, n=2, temperature=0.8)
    except Refused as problem:
        return Check(name, "warn", f"refused: {problem}", "clients that ask for several will fail")
    numbers = sorted(str(choice.get("index")) for choice in reply.choices)
    if numbers != ["0", "1"]:
        return Check(name, "fail", f"choices numbered {numbers} instead of 0 and 1")
    return Check(name, "ok", "choices 0 and 1")


async def check_unicode(service: Service) -> Check:
    """Text beyond ASCII must arrive whole however JSON wrote it, and leave whole when streamed."""
    name, api = "UTF-8 survives", service.main_api
    body = service.body(api, UNICODE_TEXT, max_tokens=16)
    forms = [json.dumps(body, ensure_ascii=ascii_only).encode() for ascii_only in (True, False)]
    escaped, raw = [
        read_reply(await post_bytes(service.client, PATHS[api], form), api) for form in forms
    ]
    if (escaped.text, escaped.usage) != (raw.text, raw.usage):
        detail = f"escaped: {escaped.text!a} {escaped.usage}; raw: {raw.text!a} {raw.usage}"
        return Check(name, "fail", detail, "decode request bodies as UTF-8")
    streamed = await service.ask_streaming(api, UNICODE_TEXT, max_tokens=16)
    if streamed.text != raw.text:
        return Check(name, "fail", f"whole {raw.text!a}, streamed {streamed.text!a}")
    return await _check_echo(service, name)


async def _check_echo(service: Service, name: str) -> Check:
    if "completions" not in service.apis:
        return Check(name, "ok", "escaped, raw and streamed agree")
    try:
        echoed = await service.ask("completions", UNICODE_TEXT, max_tokens=1, echo=True)
    except Refused:
        return Check(name, "ok", "escaped, raw and streamed agree (echo is not offered)")
    if "\ufffd" in echoed.text[: len(UNICODE_TEXT)]:
        return Check(name, "fail", f"the echo holds replacement characters: {echoed.text!a}")
    if not echoed.text.startswith(UNICODE_TEXT):
        detail = f"echo gives {echoed.text[: len(UNICODE_TEXT) + 8]!a}"
        return Check(name, "warn", detail, "right only if the tokenizer normalises its input")
    return Check(name, "ok", "escaped, raw, streamed and echoed agree")


async def check_disconnect(service: Service) -> Check:
    """Clients that leave in the middle of a stream must not harm the service."""
    name, api = "a disconnect leaves the service answering", service.main_api
    before = await service.ask(api, COUNTING[api], max_tokens=8)
    for _ in range(3):
        came = await service.leave_early(api, COUNTING[api], 2, max_tokens=200)
        if came < 2:
            return Check(name, "unknown", f"the stream held {came} events only")
    after = await service.ask(api, COUNTING[api], max_tokens=8)
    if after.text != before.text:
        return Check(name, "fail", f"before {before.text!a}, after {after.text!a}")
    return Check(name, "ok", "left three streams; the next answer came and is the same")


async def check_concurrency(service: Service) -> Check:
    """Eight requests at once must get the answers they get alone.

    At most two may drift in their second half: sums in another order can move a near-tie.
    """
    name, api = f"{len(SUBJECTS)} at once answer as alone", service.main_api
    prompts = [f"Tell me something about {subject}:" for subject in SUBJECTS]
    alone = [await service.ask(api, prompt, max_tokens=16) for prompt in prompts]
    together = await asyncio.gather(*(service.ask(api, p, max_tokens=16) for p in prompts))
    pairs = [
        (_all_text(a), _all_text(b))
        for a, b in zip(alone, together, strict=True)
        if _all_text(a) != _all_text(b)
    ]
    if not pairs:
        return Check(name, "ok", f"{len(prompts)} equal answers")
    first = f"alone {pairs[0][0]!a}, at once {pairs[0][1]!a}"
    detail = f"{len(pairs)} of {len(prompts)} differ; first: {first}"
    drifted = all(common_length(a, b) >= len(a) / 2 for a, b in pairs)
    if len(pairs) <= 2 and drifted:
        return Check(name, "warn", detail, "sums in another order may explain it")
    return Check(name, "fail", detail, "requests influence each other: batching or cache is wrong")


def _all_text(reply: Reply) -> str:
    return reply.reasoning + reply.text


def common_length(a: str, b: str) -> int:
    """How many characters two texts share from the start."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


PROTOCOL_CHECKS: tuple[tuple[str, ProtocolCheck], ...] = (
    ("stop strings are honoured", check_stop),
    ("max_tokens is honoured", check_max_tokens),
    ("usage adds up", check_usage),
    ("logprobs are sound", check_logprobs),
    ("n = 2 gives two answers", check_choices),
    ("UTF-8 survives", check_unicode),
    ("a disconnect leaves the service answering", check_disconnect),
    (f"{len(SUBJECTS)} at once answer as alone", check_concurrency),
)
