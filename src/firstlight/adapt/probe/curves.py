"""Owns measured speeds of a device: products, memory, copies from the host, storage, collectives.

Medians of a few runs, in under a minute; what a figure means for a plan is not decided here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
# A point is measured at least so often, and as long as this allows, up to so often.
_LEAST_RUNS, _MOST_RUNS, _SECONDS = 7, 51, 0.7
# A curve stops growing when one call took this long.
_LONG_SECONDS = 0.5


@dataclass(frozen=True)
class Bench:
    """A device to be measured. `spreads` gathers, for each point, how far the middle half of its
    runs lies apart, relative to the median: more than a few percent says that others were at work.
    """

    device: str
    spec: DeviceSpec
    platform: DeviceRuntime
    spreads: list[float] = field(default_factory=list)

    def seconds(self, work: Callable[[], object]) -> float:
        """Returns the median time of some runs; the first two, which set things up, don't count."""
        self._once(work)
        times: list[float] = [max(self._once(work), 1e-9)]
        began = time.perf_counter()
        while len(times) <= _LEAST_RUNS or (
            len(times) <= _MOST_RUNS and time.perf_counter() - began < _SECONDS
        ):
            times.append(max(self._once(work), 1e-9))
            if sum(times) > 4 * _LONG_SECONDS:
                break
        low, middle, high = quantiles(times[1:], n=4) if len(times) > 2 else times[-1:] * 3
        self.spreads.append((high - low) / middle)
        return middle

    def _once(self, work: Callable[[], object]) -> float:
        return seconds_of(work, self.spec, self.platform)


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Measures everything: `curves PLATFORM THREADS FOLDER`. Bytes or FLOP a second."""
    platform = find_platform(words[0])
    bench = Bench(platform.bind(0, int(words[1])), platform.spec(0), platform)
    spec, began = bench.spec, time.perf_counter()
    found: dict[str, Any] = {
        "device": spec.name,
        "cores": spec.cores,
        "count": platform.count(),
        "memory_bytes": spec.memory.available_bytes,
        "products": {d: products(d, bench) for d in DTYPES if spec.can(d)},
        "memory": copies(bench),
        "host": {} if spec.can("host_memory") else uploads(bench),
        "storage": storage(" ".join(words[2:])),
    }
    found["collective_seconds"] = two_ranks.answer((words[0], "curve"))["seconds"]
    spread = median(bench.spreads)
    return found | {"spread": spread, "took_seconds": time.perf_counter() - began}


def products(dtype: str, bench: Bench) -> dict[str, float]:
    """FLOP a second of square products, by side."""
    found: dict[str, float] = {}
    for side in SIDES:
        a, b = (torch.randn(side, side).to(bench.device, getattr(torch, dtype)) for _ in range(2))
        seconds = bench.seconds(partial(torch.mm, a, b))
        found[str(side)] = 2 * side**3 / seconds
        if seconds > _LONG_SECONDS:
            break
    return found


def copies(bench: Bench) -> dict[str, float]:
    """Bytes read and written a second when memory is copied on the device, by bytes copied."""
    found: dict[str, float] = {}
    for size in BYTES:
        source = torch.ones(size // 4, dtype=torch.float32, device=bench.device)
        target = torch.empty_like(source)
        found[str(size)] = 2 * size / bench.seconds(partial(target.copy_, source))
    return found


def uploads(bench: Bench) -> dict[str, float]:
    """Bytes a second from the host's memory, pinned where it can be, by bytes."""
    found: dict[str, float] = {}
    for size in BYTES:
        source = pinned(torch.ones(size // 4, dtype=torch.float32), bench.spec)
        work = partial(copy_to, source, bench.device, bench.spec)
        found[str(size)] = size / bench.seconds(work)
    return found


def storage(folder: str) -> dict[str, float]:
    """Bytes a second written with a final sync, and read again after the page cache let go of it.

    The cache of the machine below may still hold it: `read` is an upper bound there.
    """
    block = os.urandom(2**22)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".firstlight-probe-") as file:
        began = time.perf_counter()
        for _ in range(STORAGE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        reads = []
        for _ in range(3):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            for offset in range(0, STORAGE_BYTES, len(block)):
                os.pread(file.fileno(), len(block), offset)
            reads.append(time.perf_counter() - began)
    return {"write": STORAGE_BYTES / wrote, "read": STORAGE_BYTES / median(reads)}
