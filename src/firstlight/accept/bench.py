"""Owns a load run from settings to report: warm-up, the load, and two endpoints side by side.

Knows nothing of the servers measured; the only clock is `time.perf_counter` in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec

from firstlight.accept.bench_load import ClientLoad, Dialect, Target, negotiate, run_load
from firstlight.accept.bench_numbers import Numbers, RequestRecord, percentile, summarize
from firstlight.accept.bench_prompts import Prompt, PromptBuilder
from firstlight.accept.bench_settings import BenchSettings
from firstlight.accept.client import Endpoint
from firstlight.errors import UsageError

OPEN_LOOP_CONNECTIONS = 1000


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What one load run measured, and of what."""

    settings: BenchSettings
    model: str
    dialect: Dialect
    numbers: Numbers
    client: ClientLoad
    records: tuple[RequestRecord, ...]

    @property
    def client_was_bottleneck(self) -> bool:
        """Whether this process was too busy for its own numbers to be trusted.

        So it is when it used 90 % of a core, or when its event loop woke up late (99th percentile)
        by more than 5 ms and more than a tenth of the median gap between chunks.
        """
        gap = self.numbers.icl.p50 if self.numbers.icl else 0.0
        late = self.client.lag_p99 > max(0.005, gap / 10)
        return late or self.client.cpu_share > 0.9


@dataclass(frozen=True, slots=True)
class Ratio:
    """How one number of A relates to the same number of B over all pairs: a / b."""

    name: str
    higher_is_better: bool
    a: tuple[float, ...]
    b: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """One ratio for each pair of runs."""
        return tuple(x / y for x, y in zip(self.a, self.b, strict=True))

    @property
    def median(self) -> float:
        """The median ratio."""
        return percentile(self.ratios, 50)


@dataclass(frozen=True, slots=True)
class CompareReport:
    """Two endpoints under the same load, run in turns A B A B."""

    a: Endpoint
    b: Endpoint
    pairs: tuple[tuple[BenchReport, BenchReport], ...]
    ratios: tuple[Ratio, ...]


def run_bench(settings: BenchSettings) -> BenchReport:
    """Runs one load and returns its numbers; warm-up requests are not counted.

    Raises EnvironmentProblem when no service answers, BadInput when it refuses the requests.
    """
    return asyncio.run(_bench(settings))


def compare(
    settings: BenchSettings, a: Endpoint, b: Endpoint, *, num_pairs: int = 5
) -> CompareReport:
    """Runs the same load against A and B in turns and relates the numbers pair by pair.

    Prompts are equal within a pair and new in each pair, so that no cache of an earlier one helps.
    """
    if num_pairs < 1:
        raise UsageError(f"{num_pairs} pairs of runs; ask for 1 or more")
    return asyncio.run(_compare(settings, a, b, num_pairs))


async def _bench(settings: BenchSettings) -> BenchReport:
    builder = PromptBuilder(settings)
    async with settings.endpoint.open(_connections(settings)) as client:
        target = await negotiate(client, settings, builder.build(1, "first")[0])
        await _warm_up(client, target, builder)
        prompts = builder.build(settings.num_requests, "load")
        report = await _measure(client, target, prompts)
    if settings.requests_path is not None:
        write_records(report.records, settings.requests_path)
    return report


async def _compare(
    settings: BenchSettings, a: Endpoint, b: Endpoint, num_pairs: int
) -> CompareReport:
    builder, pairs = PromptBuilder(settings), []
    connections = _connections(settings)
    async with a.open(connections) as client_a, b.open(connections) as client_b:
        targets = []
        for client, endpoint in ((client_a, a), (client_b, b)):
            own = replace(settings, endpoint=endpoint)
            target = await negotiate(client, own, builder.build(1, "first")[0])
            await _warm_up(client, target, builder)
            targets.append(target)
        for index in range(num_pairs):
            prompts = builder.build(settings.num_requests, f"pair {index}")
            report_a = await _measure(client_a, targets[0], prompts)
            report_b = await _measure(client_b, targets[1], prompts)
            pairs.append((report_a, report_b))
    return CompareReport(a, b, tuple(pairs), _ratios(pairs))


def _connections(settings: BenchSettings) -> int:
    return OPEN_LOOP_CONNECTIONS if settings.rate is not None else settings.concurrency


async def _warm_up(client: httpx.AsyncClient, target: Target, builder: PromptBuilder) -> None:
    prompts = builder.build(target.settings.warmup_requests, "warm-up")
    if prompts:
        closed = replace(target, settings=replace(target.settings, rate=None))
        await run_load(client, closed, prompts)


async def _measure(
    client: httpx.AsyncClient, target: Target, prompts: Sequence[Prompt]
) -> BenchReport:
    records, load = await run_load(client, target, prompts)
    numbers = summarize(records, target.settings.objectives)
    return BenchReport(target.settings, target.model, target.dialect, numbers, load, tuple(records))


def write_records(records: Sequence[RequestRecord], path: Path) -> None:
    """Writes one JSON line for each request; times are seconds since the run began."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def _ratios(pairs: Sequence[tuple[BenchReport, BenchReport]]) -> tuple[Ratio, ...]:
    found = []
    for name, higher in COMPARED:
        a = [_number(report.numbers, name) for report, _ in pairs]
        b = [_number(report.numbers, name) for _, report in pairs]
        if all(a) and all(b):
            numbers_a, numbers_b = (tuple(v for v in side if v) for side in (a, b))
            found.append(Ratio(name, higher, numbers_a, numbers_b))
    return tuple(found)


COMPARED: tuple[tuple[str, bool], ...] = (
    ("output_tokens_per_second", True),
    ("total_tokens_per_second", True),
    ("requests_per_second", True),
    ("ttft.p50", False),
    ("tpot.p50", False),
    ("icl.p99", False),
    ("e2e.p50", False),
)


def _number(numbers: Numbers, name: str) -> float | None:
    value: object = numbers
    for part in name.split("."):
        value = getattr(value, part) if value is not None else None
    return value if isinstance(value, float) else None
