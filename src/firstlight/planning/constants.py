"""Owns the constants of the time model, each with its source; knows no model and no layout.

None was fitted to the published Kimi K3 points the model is compared with. Three sets say how good
software may be: `optimistic` and `pessimistic` make the band, `expected` the prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# Resident bytes of a rank beside its weights and what steps take: interpreter, torch, kernels, what
# loading leaves behind; torch 2.13 on x86-64. A start takes what the last one measured.
HOST_FRAMEWORK_BYTES = 330 * 10**6
# What an engine takes for a page or slot that it brings to the device, and for one layer's part of
# a page that it reads outside it, beside their bytes; and bytes a second that its reading threads
# check and copy. Source: this engine on two cores of an x86-64 that others used too, units of 18 to
# 576 KiB in 20 to 701 us from host memory, layers of 18 to 288 KiB in 48 to 328 us; disk alike.
FAR_UNIT_SECONDS, FAR_LAYER_SECONDS, FAR_RATE = 10e-6, 30e-6, 1e9
_MB, _GFLOP = 1e6, 1e9
# Share of the memory bandwidth an operation reaches by its bytes, and of the peak rate by its FLOP.
# Source: calculon-ai/calculon, systems/a100_80g.json (mem1 and matrix), measured on A100.
MEMORY_SHARE: tuple[tuple[float, float], ...] = (
    (0.0, 0.30),
    (1 * _MB, 0.60),
    (10 * _MB, 0.75),
    (100 * _MB, 0.90),
)
MATRIX_SHARE: tuple[tuple[float, float], ...] = (
    (0.0, 0.10),
    (1 * _GFLOP, 0.60),
    (16 * _GFLOP, 0.90),
    (128 * _GFLOP, 0.95),
)


@dataclass(frozen=True)
class Constants:
    """How far software gets on any device. Times in seconds.

    `memory` and `matrix` scale the shares above. `kernel`: least time of a kernel in a replayed
    graph. `link` and `network`: latency of a small collective within an island and beyond.
    `link_share` and `network_share`: of the link rate in large messages. `overlap`: share of
    collective time hidden under compute in prompts. `imbalance`: load of the fullest rank over the
    mean, beyond what chance alone gives. `host`: work of the engine between steps; `sequence`: more
    of it for each sequence in a step; `request`: reading a request before the engine has it.
    """

    memory: float
    matrix: float
    kernel: float
    link: float
    network: float
    link_share: float
    network_share: float
    overlap: float
    imbalance: float
    host: float
    sequence: float = 0.0
    request: float = 0.0


# kernel: NVIDIA, "Getting started with CUDA Graphs" (2.9 us of work, 3.4 us with graph replay for a
# short kernel); without graphs, launches take 4 to 6 us (susun-blog.com/blog/pegainfer-3-...).
# link: one-shot kernels about 8 us and the standard library 23 to 33 us for one to six tokens
# (sgl-project/sglang#32461). network: 46 us for small messages between two hosts
# (facebookresearch/param#40), 20 us in calculon's a100_80g.json. link_share: 0.65 there; TP 8 moves
# 64 MiB in 181 us (vllm-project/vllm#53318), which is 0.72 of 900 GB/s one way. matrix: sustained
# over peak 0.80 for H100 and 0.51 for MI300X (ml-engineering, maximum achievable matmul FLOPS).
# imbalance: with and without balancing of experts; measured per expert 32.9 without.
EXPECTED = Constants(
    memory=1.0,
    matrix=0.70,
    kernel=2.9e-6,
    link=8e-6,
    network=20e-6,
    link_share=0.65,
    network_share=0.80,
    overlap=0.3,
    imbalance=1.15,
    host=0.3e-3,
)
OPTIMISTIC = Constants(
    memory=1.05,
    matrix=0.90,
    kernel=1.5e-6,
    link=5e-6,
    network=12e-6,
    link_share=0.80,
    network_share=0.90,
    overlap=0.7,
    imbalance=1.0,
    host=0.05e-3,
)
PESSIMISTIC = Constants(
    memory=0.75,
    matrix=0.45,
    kernel=5e-6,
    link=23e-6,
    network=46e-6,
    link_share=0.45,
    network_share=0.46,
    overlap=0.0,
    imbalance=1.5,
    host=1.5e-3,
)


def share(table: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the share reached at a size, the row with the largest start not above it."""
    return table[bisect_right(table, (size, 1.0)) - 1][1]
