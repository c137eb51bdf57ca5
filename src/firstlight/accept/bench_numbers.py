"""Owns the arithmetic of a load run: percentiles, rates and goodput, and what each number means.

Knows nothing of HTTP; it reads request records only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from firstlight.accept.bench_settings import Objectives

DEFINITIONS: Mapping[str, str] = {
    "TTFT": "time to first token: from the moment a request was due (open loop) or sent (closed "
    "loop) to the first chunk that carries text",
    "TPOT": "time per output token after the first: (last chunk - first chunk) / (output tokens - "
    "1), per request with two tokens or more",
    "ICL": "inter-chunk latency: gap between one chunk with text and the next of the same request; "
    "a chunk may hold several tokens, so this is not a token time",
    "E2E": "from due or sent, as for TTFT, to the end of the stream",
    "percentile": "pN is linear between the closest ranks: position (n - 1) * N / 100 in the "
    "sorted values of requests that succeeded",
    "throughput": "sums over requests that succeeded, divided by the wall time from the first "
    "request due to the last stream ended",
    "goodput": "requests per second that succeeded and kept every objective given",
}


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request did; times are seconds since the run began, tokens as counted."""

    index: int
    due: float
    sent: float
    ended: float
    chunks: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_from: Literal["usage", "chunks"] = "usage"
    finish_reason: str = ""
    failure: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from due to the first chunk with text; None when none came."""
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None below two tokens or two chunks."""
        if len(self.chunks) < 2 or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Seconds from due to the end of the stream."""
        return self.ended - self.due

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between successive chunks with text."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks))

    def keeps(self, objectives: Objectives) -> bool:
        """Whether the request succeeded within every objective given.

        An objective on TPOT holds for an answer of one token, which has none.
        """
        if self.failure:
            return False
        limits = (
            (objectives.ttft_seconds, self.ttft if self.ttft is not None else math.inf),
            (objectives.tpot_seconds, self.tpot or 0.0),
            (objectives.e2e_seconds, self.e2e),
        )
        return all(limit is None or value <= limit for limit, value in limits)


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample in five numbers; seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


@dataclass(frozen=True, slots=True)
class Numbers:
    """Everything measured in one run; seconds, tokens and requests per second."""

    wall_seconds: float
    num_succeeded: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    num_counted_by_chunks: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput_per_second: float | None
    goodput_share: float | None
    ttft: Spread | None
    tpot: Spread | None
    icl: Spread | None
    e2e: Spread | None
    tokens_per_chunk: float | None
    failures: Mapping[str, int]


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile linear between the closest ranks; `values` must not be empty."""
    assert values and 0 <= percent <= 100, "a percentile needs values and a percent in 0..100"
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Summarises the values that are there; None when none is."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Spread(
        count=len(found),
        mean=sum(found) / len(found),
        p50=percentile(found, 50),
        p90=percentile(found, 90),
        p99=percentile(found, 99),
        maximum=max(found),
    )


def summarize(records: Sequence[RequestRecord], objectives: Objectives) -> Numbers:
    """Computes all numbers of a run from its records, of which there must be at least one."""
    good = [record for record in records if not record.failure]
    wall = max(record.ended for record in records) - min(record.due for record in records)
    per_second = (lambda amount: amount / wall) if wall > 0 else (lambda amount: 0.0)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    num_chunks = sum(len(record.chunks) for record in good)
    num_kept = sum(record.keeps(objectives) for record in records) if objectives.any else None
    return Numbers(
        wall_seconds=wall,
        num_succeeded=len(good),
        num_failed=len(records) - len(good),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        num_counted_by_chunks=sum(record.tokens_from == "chunks" for record in good),
        requests_per_second=per_second(len(good)),
        output_tokens_per_second=per_second(output_tokens),
        total_tokens_per_second=per_second(prompt_tokens + output_tokens),
        goodput_per_second=None if num_kept is None else per_second(num_kept),
        goodput_share=None if num_kept is None else num_kept / len(records),
        ttft=spread(record.ttft for record in good),
        tpot=spread(record.tpot for record in good),
        icl=spread(gap for record in good for gap in record.gaps),
        e2e=spread(record.e2e for record in good),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        failures=dict(sorted(Counter(r.failure for r in records if r.failure).items())),
    )
