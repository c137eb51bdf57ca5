"""Owns two rank processes of this machine: a sum of known numbers, and how fast sums are.

Knows a platform by its name; starts its ranks as processes, because devices cannot be forked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from firstlight.platforms.find import find_platform

RANKS = 2
_SECONDS = 60
_KNOWN = 4099  # not a multiple of anything a kernel may like
SIZES = (2**12, 2**16, 2**20, 2**24)
ROUNDS = 9
PAIRS = 3


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Returns whether the sum was right; with `curve` as second word, seconds by bytes as well."""
    with tempfile.TemporaryDirectory(prefix="firstlight-probe-") as folder:
        command = [sys.executable, "-m", __name__, words[0], f"{folder}/store", *words[1:]]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        try:
            outputs = [process.communicate(timeout=_SECONDS) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    failed = [
        (i, e) for i, (p, (_, e)) in enumerate(zip(ranks, outputs, strict=True)) if p.returncode
    ]
    if failed:
        rank, said = failed[0]
        raise RuntimeError(f"rank {rank} of two: {(said.strip().splitlines() or ['silence'])[-1]}")
    found: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def sum_seconds(platform: str) -> dict[str, float]:
    """Returns seconds of a sum by bytes, medians of PAIRS pairs of processes one after the other: a
    pair keeps for its life where it came to lie, and differs from others by a tenth.
    """
    pairs = [answer((platform, "curve"))["seconds"] for _ in range(PAIRS)]
    return {size: median(pair[size] for pair in pairs) for size in pairs[0]}


def run(name: str, store: str, rank: int, *, curve: bool) -> dict[str, Any]:
    """Is one rank: joins, sums, and on request measures."""
    platform = find_platform(name)
    device = platform.bind(rank % platform.count(), 1)
    dist.init_process_group(
        platform.collective_backend,
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_SECONDS),
    )
    part = torch.arange(_KNOWN, dtype=torch.float32, device=device) * (rank + 1)
    dist.all_reduce(part)
    expected = torch.arange(_KNOWN, dtype=torch.float32) * (RANKS * (RANKS + 1) // 2)
    right = bool(torch.equal(part.cpu(), expected))
    found: dict[str, Any] = {
        "right": right,
        "detail": f"{RANKS} ranks summed {_KNOWN} numbers" if right else "numbers differ",
    }
    if curve:
        found["seconds"] = _sums(device)
    dist.destroy_process_group()
    return found


def _sums(device: str) -> dict[str, float]:
    """Seconds of a sum by bytes: of rounds that have every size, the end of the fastest quarter.

    Two processes wait for each other: whatever takes a core from one of them is in most rounds of
    a machine that does anything else.
    """
    runs: dict[int, list[float]] = {size: [] for size in SIZES}
    data = {size: torch.ones(size // 4, dtype=torch.float32, device=device) for size in SIZES}
    for _ in range(ROUNDS + 1):
        for size, times in runs.items():
            times.append(_timed(partial(dist.all_reduce, data[size]), _repeats(size)))
    return {str(size): quantiles(times[1:], n=4)[0] for size, times in runs.items()}


def _repeats(num_bytes: int) -> int:
    """The same on both ranks, so that they call alike; a few tens of milliseconds."""
    return max(2, min(256, 2**24 // num_bytes))


def _timed(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one call."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    platform_name, store_path, *extra = sys.argv[1:]
    print(json.dumps(run(platform_name, store_path, int(extra[-1]), curve="curve" in extra)))
