"""Owns measured speeds of a device: products, memory, copies from the host, storage, collectives.

Medians of rounds spread over time, in under a minute; what a figure means for a plan is not decided
here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

from firstlight.adapt.probe import two_ranks
from firstlight.platforms.find import find_platform
from firstlight.platforms.interface import DeviceRuntime
from firstlight.platforms.spec import DeviceSpec
from firstlight.platforms.tools import copy_to, pinned, seconds_of

SIDES = (256, 512, 1024, 2048)
BYTES = (2**20, 2**24, 2**28)
DTYPES = ("float32", "bfloat16")
STORAGE_BYTES = 2**28
STORAGE_RUNS = 5
# Every point is measured once a round. What slows the machine for some seconds then meets a few
# rounds of each point and moves no median, where it would have spoiled one point whole.
ROUNDS = 9
_ROUND_SECONDS, _MOST_RUNS = 0.12, 400
# A curve stops growing when one call took this long.
_LONG_SECONDS = 0.5


@dataclass(frozen=True)
class Bench:
    """A device to be measured, with so many of the host's threads."""

    device: str
    spec: DeviceSpec
    platform: DeviceRuntime
    threads: int = 1

    def once(self, work: Callable[[], object]) -> float:
        """Returns the seconds of one run. Of one thread of the host it is the time it had a
        processor: whatever else takes that away for a while is not the device's.
        """
        if self.threads == 1 and self.spec.can("host_memory"):
            began = time.thread_time()
            work()
            return max(time.thread_time() - began, 1e-9)
        return max(seconds_of(work, self.spec, self.platform), 1e-9)

    def round(self, work: Callable[[], object]) -> list[float]:
        """Returns the seconds of as many runs as a round has time for, at least one."""
        times: list[float] = []
        ends = time.perf_counter() + _ROUND_SECONDS
        while not times or (time.perf_counter() < ends and len(times) < _MOST_RUNS):
            times.append(self.once(work))
        return times


@dataclass(frozen=True)
class Point:
    """One place of a curve: what is run there, and how many bytes or FLOP a run moves."""

    curve: str
    size: str
    amount: int
    work: Callable[[], object]


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Measures everything: `curves PLATFORM THREADS FOLDER`. Bytes or FLOP a second."""
    platform, threads = find_platform(words[0]), int(words[1])
    bench = Bench(platform.bind(0, threads), platform.spec(0), platform, threads)
    spec, began = bench.spec, time.perf_counter()
    curves, spread = measured([*products(bench), *copies(bench), *uploads(bench)], bench)
    found: dict[str, Any] = {
        "device": spec.name,
        "cores": spec.cores,
        "count": platform.count(),
        "memory_bytes": spec.memory.available_bytes,
        "products": {d: curves[d] for d in DTYPES if d in curves},
        "memory": curves["memory"],
        "host": curves.get("host", {}),
        "storage": storage(" ".join(words[2:])),
    }
    found["collective_seconds"] = two_ranks.sum_seconds(words[0])
    return found | {"spread": spread, "took_seconds": time.perf_counter() - began}


def measured(points: Sequence[Point], bench: Bench) -> tuple[dict[str, dict[str, float]], float]:
    """Returns amounts a second by curve and size, and the median spread: how far the middle half
    of a point's runs lies apart, relative to their median. A few percent say that others worked.
    """
    rounds: list[list[list[float]]] = [[] for _ in points]
    for _ in range(ROUNDS):
        for times, point in zip(rounds, points, strict=True):
            times.append(bench.round(point.work))
    curves: dict[str, dict[str, float]] = {}
    spreads = []
    for times, point in zip(rounds, points, strict=True):
        seconds = median(median(each) for each in times)
        curves.setdefault(point.curve, {})[point.size] = point.amount / seconds
        low, _, high = quantiles([one for each in times for one in each], n=4)
        spreads.append((high - low) / seconds)
    return curves, median(spreads)


def products(bench: Bench) -> Iterator[Point]:
    """Square products of each type the device has, run once, until one of them takes long."""
    for dtype in DTYPES:
        if not bench.spec.can(dtype):
            continue
        for side in SIDES:
            a, b = (
                torch.randn(side, side).to(bench.device, getattr(torch, dtype)) for _ in range(2)
            )
            work = partial(torch.mm, a, b)
            bench.once(work)  # sets things up
            yield Point(dtype, str(side), 2 * side**3, work)
            if bench.once(work) > _LONG_SECONDS:
                break


def copies(bench: Bench) -> Iterator[Point]:
    """Copies within the device's memory; bytes are read and written."""
    for size in BYTES:
        source = torch.ones(size // 4, dtype=torch.float32, device=bench.device)
        work = partial(torch.empty_like(source).copy_, source)
        bench.once(work)
        yield Point("memory", str(size), 2 * size, work)


def uploads(bench: Bench) -> Iterator[Point]:
    """Copies from the host's memory, pinned where it can be; none where that is the device's."""
    for size in () if bench.spec.can("host_memory") else BYTES:
        source = pinned(torch.ones(size // 4, dtype=torch.float32), bench.spec)
        work = partial(copy_to, source, bench.device, bench.spec)
        bench.once(work)
        yield Point("host", str(size), size, work)


def storage(folder: str) -> dict[str, float]:
    """Bytes a second written with a final sync, and read again after the page cache let go of it.

    Medians of a few runs. The cache of the machine below may still hold what is read: `read` is an
    upper bound there.
    """
    runs = [_stored(folder) for _ in range(STORAGE_RUNS)]
    wrote, read = (STORAGE_BYTES / median(seconds) for seconds in zip(*runs, strict=True))
    return {"write": wrote, "read": read}


def _stored(folder: str) -> tuple[float, float]:
    """Seconds of writing a new file, and of reading it."""
    block = os.urandom(2**22)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".firstlight-probe-") as file:
        began = time.perf_counter()
        for _ in range(STORAGE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for offset in range(0, STORAGE_BYTES, len(block)):
            os.pread(file.fileno(), len(block), offset)
        return wrote, time.perf_counter() - began
