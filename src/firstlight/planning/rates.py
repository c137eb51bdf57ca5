"""Owns how long one operation or one message takes on a device: roofline, and alpha-beta.

Knows no model. Every time is in seconds; a message's size is what one rank contributes, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.planning.constants import (
    MATRIX_SHARE,
    MEMORY_SHARE,
    OPTIMISTIC,
    PESSIMISTIC,
    Constants,
    share,
)
from firstlight.planning.hardware import HOST_VENDOR, Device, Figure, Fleet

# No operation gets more of the memory bandwidth than a copy does: 3,089 of 3,350 GB/s on H100.
_MOST_MEMORY = 0.92
# Tensor cores take fp32 values at about half the rate of bf16 ones.
_FP32_RATE = 0.5


@dataclass(frozen=True)
class Rates:
    """A device and its links under one set of constants; bytes and FLOP a second.

    `measured`: rates are what programs reach, not what a data sheet promises.
    """

    constants: Constants
    memory: float
    matrix: float
    narrow: float
    link: float
    network: float
    island: int
    measured: bool = False

    def operation(self, num_bytes: float, flops: float, *, narrow: bool = False) -> float:
        """Returns the time of one kernel: memory or arithmetic, whichever takes longer."""
        known = self.constants
        memory_share, matrix_share = known.memory, known.matrix
        if not self.measured:
            memory_share = min(_MOST_MEMORY, share(MEMORY_SHARE, num_bytes) * known.memory)
            matrix_share *= share(MATRIX_SHARE, flops)
        moving = num_bytes / (self.memory * memory_share)
        rate = self.narrow if narrow else self.matrix
        computing = flops / (rate * matrix_share)
        return max(moving, computing, known.kernel)

    def all_reduce(self, num_bytes: float, ranks: int) -> float:
        """Returns the time of a sum over ranks that lie next to one another."""
        if ranks == 1:
            return 0.0
        inner = min(ranks, self.island)
        outer = -(-ranks // inner)
        seconds = self.constants.link + _ring(inner) * num_bytes / self.link if inner > 1 else 0.0
        if outer > 1:
            seconds += self.constants.network + _ring(outer) * num_bytes / inner / self.network
        return seconds

    def all_to_all(self, num_bytes: float, ranks: int) -> float:
        """Returns the time in which every rank sends `num_bytes`, spread over all ranks."""
        if ranks == 1:
            return 0.0
        inside = min(1.0, self.island / ranks)
        seconds = num_bytes * inside / self.link + self.constants.link
        if inside < 1:
            seconds += num_bytes * (1 - inside) / self.network + self.constants.network
        return seconds

    def send(self, num_bytes: float, *, far: bool) -> float:
        """Returns the time of a message to one rank, beyond the island when `far`."""
        if far:
            return num_bytes / self.network + self.constants.network
        return num_bytes / self.link + self.constants.link


def _ring(ranks: int) -> float:
    """Copies of a message that pass each link in a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks


def rates_of(fleet: Fleet, constants: Constants, dtype: str) -> Rates:
    """Returns the rates of a fleet; unpublished figures take the end of their range that suits
    the constants.
    """
    device = fleet.device
    dense = _pick(device.bf16_rate, constants)
    if dtype == "float32" and device.vendor != HOST_VENDOR:
        dense *= _FP32_RATE
    return Rates(
        constants=constants,
        memory=_pick(device.memory_bandwidth, constants),
        matrix=dense,
        narrow=_narrow_rate(device, constants, dense),
        link=_pick(device.link_bandwidth, constants) * constants.link_share,
        network=_pick(device.network_bandwidth, constants) * constants.network_share,
        island=fleet.island,
        measured=device.vendor == HOST_VENDOR,
    )


def _narrow_rate(device: Device, constants: Constants, dense: float) -> float:
    """4-bit weights meet 8-bit values where a device multiplies narrow types, else 16-bit ones."""
    if device.low_bit_rate is None or device.fp8_rate is None:
        return dense
    return _pick(device.fp8_rate, constants)


def _pick(figure: Figure, constants: Constants) -> float:
    if constants is PESSIMISTIC:
        return figure.pessimistic
    return figure.optimistic if constants is OPTIMISTIC else figure.expected
