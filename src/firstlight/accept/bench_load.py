"""Owns how load reaches an endpoint: what it accepts, one timed request, closed and open loops.

Knows nothing of percentiles or reports; it returns request records and how late the client was.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import httpx

from firstlight.accept.bench_numbers import RequestRecord
from firstlight.accept.bench_prompts import Prompt
from firstlight.accept.bench_settings import BenchSettings
from firstlight.accept.client import PATHS, BrokenStream, StreamRefused, get, stream, unreachable
from firstlight.errors import BadInput

LAG_PERIOD_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Dialect:
    """What this endpoint accepts beyond the least every endpoint takes."""

    token_ids: bool
    ignore_eos: bool
    usage: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be left out, in words."""
        missing = (
            (self.token_ids, "prompts were sent as text, so their length in tokens is approximate"),
            (self.ignore_eos, "answers may end before the asked number of tokens (no ignore_eos)"),
            (self.usage, "the endpoint gives no usage: output tokens are counted as chunks"),
        )
        return tuple(text for accepted, text in missing if not accepted)


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy the measuring client itself was; seconds and a share of one core."""

    lag_p99: float
    lag_maximum: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint that was asked what it accepts."""

    settings: BenchSettings
    model: str
    dialect: Dialect


async def find_model(client: httpx.AsyncClient, wanted: str) -> str:
    """Returns `wanted`, or the first model the endpoint lists when none is named.

    Raises BadInput when the endpoint lists none.
    """
    if wanted:
        return wanted
    answer = await get(client, "/v1/models")
    rows = answer.body.get("data") if isinstance(answer.body, dict) else None
    names = [row.get("id") for row in rows if isinstance(row, dict)] if rows else []
    if not names or not isinstance(names[0], str):
        raise BadInput(
            f"{client.base_url}: /v1/models lists no model (HTTP {answer.status}); name the model"
        )
    return names[0]


async def negotiate(client: httpx.AsyncClient, settings: BenchSettings, prompt: Prompt) -> Target:
    """Finds the model and the richest request the endpoint does not refuse.

    Raises BadInput with the endpoint's own words when it refuses even the plainest one.
    """
    model = await find_model(client, settings.model)
    refusal = ""
    for dialect in _dialects(settings, prompt):
        target = Target(settings, model, dialect)
        body = {**request_body(target, prompt), "max_tokens": 2}
        try:
            async with aclosing(stream(client, PATHS[settings.api], body)) as events:
                async for _ in events:
                    pass
        except StreamRefused as problem:
            refusal = refusal or str(problem)
            if problem.answer.status not in (400, 404, 422):
                break
            continue
        except BrokenStream as problem:
            raise BadInput(f"{client.base_url}: {problem}") from problem
        except httpx.TransportError as problem:
            raise unreachable(client, PATHS[settings.api], problem) from problem
        return target
    raise BadInput(f"{client.base_url}: the endpoint refuses the load's requests: {refusal}")


def _dialects(settings: BenchSettings, prompt: Prompt) -> Iterator[Dialect]:
    """All dialects worth trying, those that give up least first."""
    can_send_ids = settings.api == "completions" and prompt.token_ids is not None
    wanted = [("usage", True), ("ignore_eos", settings.ignore_eos), ("token_ids", can_send_ids)]
    names = [name for name, want in wanted if want]
    for num_dropped in range(len(names) + 1):
        for dropped in combinations(reversed(names), num_dropped):
            kept = {name: name in names and name not in dropped for name, _ in wanted}
            yield Dialect(**kept)


def request_body(target: Target, prompt: Prompt) -> dict[str, Any]:
    """The JSON of one streaming request in the target's dialect."""
    settings, dialect = target.settings, target.dialect
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": settings.output_tokens,
        "temperature": 0,
        "stream": True,
    }
    if settings.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt.text}]
    elif dialect.token_ids and prompt.token_ids is not None:
        body["prompt"] = list(prompt.token_ids)
    else:
        body["prompt"] = prompt.text
    if dialect.ignore_eos:
        body["ignore_eos"] = True
    if dialect.usage:
        body["stream_options"] = {"include_usage": True}
    return body


async def run_load(
    client: httpx.AsyncClient, target: Target, prompts: Sequence[Prompt]
) -> tuple[list[RequestRecord], ClientLoad]:
    """Sends every prompt once, closed or open loop, and watches the client while doing so."""
    lags: list[float] = []
    origin, cpu = time.perf_counter(), time.process_time()
    watcher = asyncio.create_task(_watch_lag(lags))
    try:
        if target.settings.rate is None:
            records = await _closed_loop(client, target, prompts, origin)
        else:
            records = await _open_loop(client, target, prompts, origin)
    finally:
        watcher.cancel()
    share = (time.process_time() - cpu) / max(time.perf_counter() - origin, 1e-9)
    ordered = sorted(lags) or [0.0]
    p99 = ordered[round((len(ordered) - 1) * 0.99)]
    return sorted(records, key=lambda r: r.index), ClientLoad(p99, ordered[-1], share)


async def _closed_loop(
    client: httpx.AsyncClient, target: Target, prompts: Sequence[Prompt], origin: float
) -> list[RequestRecord]:
    todo = iter(enumerate(prompts))
    records: list[RequestRecord] = []

    async def work() -> None:
        for index, prompt in todo:
            due = time.perf_counter() - origin
            records.append(await _request(client, target, prompt, _Clock(origin, index, due)))

    await asyncio.gather(*(work() for _ in range(min(target.settings.concurrency, len(prompts)))))
    return records


async def _open_loop(
    client: httpx.AsyncClient, target: Target, prompts: Sequence[Prompt], origin: float
) -> list[RequestRecord]:
    rate = target.settings.rate
    assert rate is not None, "an open loop needs a rate"
    source = random.Random(f"{target.settings.seed}/arrivals")
    tasks, due = [], 0.0
    for index, prompt in enumerate(prompts):
        due += source.expovariate(rate) if index else 0.0
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - origin)))
        clock = _Clock(origin, index, due)
        tasks.append(asyncio.create_task(_request(client, target, prompt, clock)))
    return list(await asyncio.gather(*tasks))


@dataclass(frozen=True, slots=True)
class _Clock:
    origin: float
    index: int
    due: float

    def now(self) -> float:
        return time.perf_counter() - self.origin


async def _request(
    client: httpx.AsyncClient, target: Target, prompt: Prompt, clock: _Clock
) -> RequestRecord:
    sent = clock.now()
    reading = _Reading(clock.origin)
    failure, detail = "", ""
    try:
        body = request_body(target, prompt)
        async with aclosing(stream(client, PATHS[target.settings.api], body)) as events:
            async for event in events:
                if not event.is_done:
                    reading.take(event.seconds, event.parse())
    except StreamRefused as problem:
        failure, detail = f"http {problem.answer.status}", problem.answer.error_message
    except BrokenStream as problem:
        failure, detail = "broken stream", str(problem)
    except httpx.TimeoutException as problem:
        failure, detail = "timeout", type(problem).__name__
    except httpx.TransportError as problem:
        failure, detail = "connection", f"{type(problem).__name__}: {problem}"
    record = reading.record(clock, sent)
    if not failure and not record.output_tokens:
        failure, detail = "empty", "the stream held no token"
    return replace(record, failure=failure, detail=detail[:200])


class _Reading:
    """What one stream has shown so far."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._chunks: list[float] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""

    def take(self, seconds: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise BrokenStream(f"the stream carried an error: {str(event['error'])[:160]}")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        for choice in event.get("choices") or ():
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            if chunk_text(choice):
                self._chunks.append(seconds - self._origin)

    def record(self, clock: _Clock, sent: float) -> RequestRecord:
        counted = self._usage.get("completion_tokens")
        return RequestRecord(
            index=clock.index,
            due=clock.due,
            sent=sent,
            ended=clock.now(),
            chunks=tuple(self._chunks),
            prompt_tokens=self._usage.get("prompt_tokens") or 0,
            output_tokens=counted if isinstance(counted, int) else len(self._chunks),
            tokens_from="usage" if isinstance(counted, int) else "chunks",
            finish_reason=self._finish_reason,
        )


def chunk_text(choice: dict[str, Any]) -> str:
    """All text one streamed choice carries: content, reasoning and tool calls alike."""
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content")]
    parts += [delta.get("reasoning"), str(delta["tool_calls"]) if delta.get("tool_calls") else ""]
    return "".join(part for part in parts if isinstance(part, str))


async def _watch_lag(lags: list[float]) -> None:
    """Records how much later than asked the event loop wakes a sleeper, in seconds."""
    while True:
        asked = time.perf_counter() + LAG_PERIOD_SECONDS
        await asyncio.sleep(LAG_PERIOD_SECONDS)
        lags.append(max(0.0, time.perf_counter() - asked))
