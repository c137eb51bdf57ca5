"""Times several sides of one question in turn, and what this machine reaches, in the same run.

Owns rounds, medians and limits; refuses to know what is computed. Every round runs every side once,
so that a machine that slows down slows all of them; the medians over rounds count. With one thread
its CPU time is taken, so that other work on the machine disturbs less.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Threads of torch that spin after their turn would take the cores of the other side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

READ_BYTES = 600 << 20
SQUARE = 2048


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call, or with one thread its CPU time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call()
    return clock() - begin


def medians(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each side; the first call of each is not counted."""
    for call in sides.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            times[name].append(seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass(frozen=True)
class Limits:
    """What this machine reaches: bytes read and multiply-adds of large matmuls per second."""

    bytes_per_second: float
    fp32: float
    bf16: float

    def __str__(self) -> str:
        return (
            f"limits: {self.bytes_per_second / 1e9:.1f} GB/s read, "
            f"{self.fp32 / 1e9:.0f} G fp32 and {self.bf16 / 1e9:.0f} G bf16 products/s"
        )


def measured_limits() -> Limits:
    """Measure a plain sum over cold memory and two large matmuls; the best of several counts."""
    cold = torch.ones(READ_BYTES // 4)
    left, right = torch.randn(2, SQUARE, SQUARE)
    half = left.bfloat16(), right.bfloat16()

    def best(call: Callable[[], object]) -> float:
        return min(seconds(call) for _ in range(6))

    multiplied = SQUARE**3
    return Limits(
        READ_BYTES / best(lambda: cold.sum()),
        multiplied / best(lambda: left @ right),
        multiplied / best(lambda: half[0] @ half[1]),
    )
