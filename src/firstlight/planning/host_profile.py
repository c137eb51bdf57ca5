"""Owns the figures of this machine's processors as a device, by a short measurement.

Knows no torch: memory is timed by copying, arithmetic by a matrix product of numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from firstlight.planning.hardware import HOST_VENDOR, Device, Figure
from firstlight.platforms.host import Host, read_host

_COPY_BYTES = 64 * 2**20
_SIDE = 768
_TRIES = 3
_SOURCE = "measured on this machine"


def measure_host(host: Host | None = None) -> Device:
    """Returns this machine as a device: memory it may take, copy bandwidth (read and write), fp32
    products a second. Takes about a second.
    """
    found = host or read_host()
    source = np.ones(_COPY_BYTES // 4, np.float32)
    target = np.empty_like(source)
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    copying = _fastest(lambda: np.copyto(target, source))
    computing = _fastest(lambda: np.matmul(matrix, matrix))
    bandwidth = Figure(2 * _COPY_BYTES / copying, _SOURCE)
    return Device(
        name="cpu",
        vendor=HOST_VENDOR,
        island=max(1, found.cores),
        machine=max(1, found.cores),
        memory=Figure(float(found.memory.available_bytes), _SOURCE),
        memory_bandwidth=bandwidth,
        bf16_rate=Figure(2 * _SIDE**3 / computing, f"{_SOURCE}, fp32"),
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        notes=f"{found.processor}, {found.cores} cores; ranks share its memory and bandwidth",
    )


def _fastest(work: Callable[[], object]) -> float:
    """Returns the shortest of a few runs, the first of which also touches the memory."""
    times = []
    for _ in range(_TRIES + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(1e-9, min(times[1:]))
