"""Owns measured speeds of a device: products, memory, copies from the host, storage, collectives.

Medians of a few runs, in under a minute; what a figure means for a plan is not decided here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
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
_RUNS = 7
# A device curve stops growing a size when one call took this long.
_LONG_SECONDS = 0.5


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Measures everything: `curves PLATFORM THREADS FOLDER`. Bytes or FLOP a second."""
    platform = find_platform(words[0])
    device = platform.bind(0, int(words[1]))
    spec = platform.spec(0)
    began = time.perf_counter()
    found: dict[str, Any] = {
        "device": spec.name,
        "cores": spec.cores,
        "count": platform.count(),
        "memory_bytes": spec.memory.available_bytes,
        "products": {d: products(d, device, spec, platform) for d in DTYPES if spec.can(d)},
        "memory": copies(device, spec, platform),
        "host": {} if spec.can("host_memory") else uploads(device, spec, platform),
        "storage": storage(" ".join(words[2:])),
    }
    found["collective_seconds"] = two_ranks.answer((words[0], "curve"))["seconds"]
    return found | {"took_seconds": time.perf_counter() - began}


def products(
    dtype: str, device: str, spec: DeviceSpec, platform: DeviceRuntime
) -> dict[str, float]:
    """FLOP a second of square products, by side."""
    found: dict[str, float] = {}
    for side in SIDES:
        a, b = (torch.randn(side, side).to(device, getattr(torch, dtype)) for _ in range(2))
        seconds = _median(partial(torch.mm, a, b), spec, platform)
        found[str(side)] = 2 * side**3 / seconds
        if seconds > _LONG_SECONDS:
            break
    return found


def copies(device: str, spec: DeviceSpec, platform: DeviceRuntime) -> dict[str, float]:
    """Bytes read and written a second when memory is copied on the device, by bytes copied."""
    found: dict[str, float] = {}
    for size in BYTES:
        source = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        seconds = _median(partial(target.copy_, source), spec, platform)
        found[str(size)] = 2 * size / seconds
    return found


def uploads(device: str, spec: DeviceSpec, platform: DeviceRuntime) -> dict[str, float]:
    """Bytes a second from the host's memory, pinned where it can be, by bytes."""
    found: dict[str, float] = {}
    for size in BYTES:
        source = pinned(torch.ones(size // 4, dtype=torch.float32), spec)
        seconds = _median(partial(copy_to, source, device, spec), spec, platform)
        found[str(size)] = size / seconds
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


def _median(work: Callable[[], object], spec: DeviceSpec, platform: DeviceRuntime) -> float:
    """The first run, which also sets things up, does not count."""
    first = seconds_of(work, spec, platform)
    second = seconds_of(work, spec, platform)
    runs = 3 if max(first, second) > _LONG_SECONDS else _RUNS
    return max(1e-9, median(seconds_of(work, spec, platform) for _ in range(runs)))
