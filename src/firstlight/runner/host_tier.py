"""Owns rows of bytes in host memory, taken slab by slab when they are first needed.

Knows nothing of what the rows hold.
"""

from collections.abc import Callable

import torch

from firstlight.errors import EnvironmentProblem
from firstlight.runner.unit_bytes import Row
from firstlight.sharding.tier_pieces import rows_per_slab
from firstlight.units import format_bytes

Allocate = Callable[[int, int, bool], Row]


def allocate_rows(num_rows: int, row_bytes: int, pinned: bool) -> Row:
    """Returns rows [num_rows, row_bytes] in host memory; a device reads it faster if `pinned`."""
    rows: Row = torch.empty(num_rows, row_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()
    return rows


class HostTier:
    """`num_rows` rows of `row_bytes`."""

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        *,
        pinned: bool = False,
        allocate: Allocate = allocate_rows,
    ) -> None:
        self.num_rows, self._row_bytes = num_rows, row_bytes
        self._pinned, self._allocate = pinned, allocate
        self._per_slab = rows_per_slab(row_bytes)
        self._slabs: dict[int, Row] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def row(self, index: int) -> Row:
        """One row. Raises EnvironmentProblem when the host gives no memory for it."""
        number, place = divmod(index, self._per_slab)
        slab = self._slabs.get(number)
        if slab is None:
            count = min(self._per_slab, self.num_rows - number * self._per_slab)
            try:
                slab = self._allocate(count, self._row_bytes, self._pinned)
            except (MemoryError, RuntimeError) as error:
                size = format_bytes(count * self._row_bytes)
                raise EnvironmentProblem(
                    f"host memory: no room for {size} of the cache's host tier ({error}); lower "
                    "host= in --tiers"
                ) from error
            self._slabs[number] = slab
        row: Row = slab[place]
        return row
