"""Owns where each unit of a cache group lies on one rank: its row in host memory, its bytes in the
file.

Reads and writes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from firstlight.cache.far_pool import DISK, HOST, FarSizes
from firstlight.runner.host_tier import HostTier
from firstlight.runner.unit_bytes import GroupUnits, Row

# What one task moves: so many bytes of neighbouring units, and one unit at least.
PIECE_BYTES = 1024**2


@dataclass
class GroupPlaces:
    """One cache group: its units on the device, how many lie where, and its part of the file."""

    units: GroupUnits
    sizes: FarSizes
    host: HostTier
    first_byte: int

    @cached_property
    def spans(self) -> list[slice]:
        """Where each layer lies in a row."""
        return self.units.spans()

    @property
    def first(self) -> int:
        """The least number of a unit outside the device."""
        return self.units.num_units

    @property
    def unit_bytes(self) -> int:
        """Bytes of a row."""
        return self.units.unit_bytes

    @property
    def per_piece(self) -> int:
        """Units that one task moves at most."""
        return max(1, PIECE_BYTES // self.unit_bytes)

    def place(self, unit: int) -> str:
        """`host` or `disk`."""
        return HOST if unit < self.first + self.sizes.host else DISK

    def host_row(self, unit: int) -> Row:
        """The row of a unit in host memory."""
        return self.host.row(unit - self.first)

    def offset(self, unit: int) -> int:
        """Where a unit lies in the file, behind the header."""
        index = unit - self.first - self.sizes.host
        return self.first_byte + index * self.unit_bytes


def runs(units: Sequence[int]) -> Iterator[slice]:
    """Yields which of ascending numbers follow each other without a gap."""
    first = 0
    for index in range(1, len(units) + 1):
        if index == len(units) or units[index] != units[index - 1] + 1:
            yield slice(first, index)
            first = index
