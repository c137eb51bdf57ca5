"""Owns what machine this is, what it can do at most, and how much memory processes hold.

Knows nothing of models; limits are measured in a process of their own, with torch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

INTERESTING = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
_LIMITS = """
import json, time, torch
torch.set_num_threads({threads})
def best(run, times):
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter(); run(); found.append(time.perf_counter() - start)
    return min(found)
n = 2048
a, b = torch.randn(n, n), torch.randn(n, n)
gemm = 2 * n**3 / best(lambda: torch.mm(a, b), 8)
big = torch.ones(128 * 1024 * 1024)
read = big.numel() * 4 / best(lambda: big.sum(), 8)
rows = torch.randn(65536, 1024); x = torch.randn(1024)
matvec = rows.numel() * 4 / best(lambda: torch.mv(rows, x), 8)
print(json.dumps(dict(gemm_flops=gemm, read_bytes=max(read, matvec), torch=torch.__version__)))
"""


def describe_machine() -> dict[str, Any]:
    """CPU, flags of interest, memory, kernel and how busy the machine was before the run."""
    info = _cpu_info()
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name", platform.processor() or "unknown"),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in INTERESTING if flag in flags],
        "l3_cache": info.get("cache size", "unknown"),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def _cpu_info() -> dict[str, str]:
    rows: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        rows[name.strip()] = value.strip()
    return rows


def measure_limits(num_threads: int, *, passive: bool = False) -> dict[str, Any]:
    """fp32 GEMM in FLOP/s and memory reads in bytes/s, the best of several runs each."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITS.format(threads=num_threads)],
        capture_output=True,
        text=True,
        check=True,
        env=thread_environment(num_threads, passive=passive),
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def thread_environment(num_threads: int, *, passive: bool = False) -> dict[str, str]:
    """The environment of a child that may use `num_threads` threads and no network.

    `passive` lets idle threads sleep: on a machine shared with others, threads that spin at a
    barrier while their partner waits for a core make everything some ten times slower.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if passive:
        own |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    return {**os.environ, **own, **{name: str(num_threads) for name in names}}


def resident_bytes(pid: int) -> dict[str, int]:
    """PSS and RSS of a process and all its descendants; PSS counts a shared page once."""
    root = psutil.Process(pid)
    total = {"pss": 0, "rss": 0, "processes": 0}
    for process in (root, *root.children(recursive=True)):
        try:
            info = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        total["pss"] += info.pss
        total["rss"] += info.rss
        total["processes"] += 1
    return total
