"""Owns one growing run of consecutive blocks for each table, and when others move to make room.

Knows no tensor and no scheduling: copies are ordered through `Moves`, in the order in which they
must be made.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from firstlight.cache.allocator import Demand
from firstlight.cache.block_stock import BlockStock
from firstlight.cache.block_table import Table
from firstlight.cache.extents import Extent, Shift, cheapest_room, gaps_between
from firstlight.cache.moves import Moves, UnitMove

# Blocks that may be copied for each block of room: what computing one again costs, as measured
# (docs/benchmarks/allocators.md). Otherwise a request yields, whose blocks are that room, and
# computes them again, or a new one waits.
COPIES_PER_BLOCK = 128


class Place(NamedTuple):
    """A free run of blocks from `start` on, once the shifts were carried out."""

    start: int
    shifts: tuple[Shift, ...] = ()


class DynamicAllocator:
    """The blocks of a table lie in a row, its extent, and no block is in two tables.

    An extent grows into the free blocks behind it. Where there are none, it moves to a larger gap
    or its neighbours are pushed aside, whichever copies least for each block of room; as much room
    again as it is long is tried first, and whoever moves gets a part of what is left. Copies are
    made when they pay, compared with computing the blocks of a request that would have to yield
    instead, or with letting a new one wait; alone, a request may have everything moved.

    A found prefix is taken where it lies if it is one run that nobody holds, and nothing lies
    behind it that continues it; otherwise it is copied, and the original stays findable.
    `is_arriving` says whose blocks are written from outside: these stay where they are.
    """

    def __init__(
        self,
        stock: BlockStock,
        tables: dict[str, Table],
        moves: Moves,
        *,
        group: int,
        is_arriving: Callable[[str], bool],
    ) -> None:
        self._stock, self._tables, self._moves = stock, tables, moves
        self._group, self._is_arriving = group, is_arriving
        self._num_blocks = stock.pool.num_blocks
        self._closings = 0
        # Of free blocks that can be found: the closing that left them, and the one that used them.
        self._left_by = [0] * self._num_blocks
        self._used_at = [0] * self._num_blocks
        self.num_copied = 0

    def usable(self, found: Sequence[int | None]) -> int:
        """Those of one run, which can be taken where they lie; of others as many as can be copied
        beside the originals.
        """
        near = 0
        for length, block in enumerate(found):
            near += block is not None
            if length + 1 + near > self._stock.pool.num_usable:
                return max(_first_run(found), length)
        return len(found)

    def cost(self, demand: Demand) -> int:
        """Originals that nobody holds stay until they were copied."""
        if self._takes_in_place(demand):
            return demand.num_blocks
        return max(demand.num_blocks, self._copying_cost(demand.found))

    def can_open(self, demand: Demand) -> bool:
        """Whether there is a place, or making one pays."""
        return self._find_place(demand) is not None

    def open(self, demand: Demand) -> list[int]:
        """Takes a found run where it lies, or copies what was found to a new extent."""
        place, in_place = self._find_place(demand), self._takes_in_place(demand)
        assert place is not None, "a table is opened without room"
        find, key_of = self._stock.index.find, self._stock.index.key_of
        keys = [None if block is None else key_of(block) for block in demand.found]
        runs = self._unheld_runs(demand.found)
        kept = [key for run in runs for block in run if (key := key_of(block)) is not None]
        for key in kept:
            self._stock.share(_found(find(key)))
        self._shift(place.shifts)
        if in_place:
            return [_found(find(key)) for key in keys if key is not None]
        blocks = list(range(place.start, place.start + len(keys)))
        for block, key in zip(blocks, keys, strict=True):
            self._take(block)
            if key is not None:
                self._order_copy(_found(find(key)), block)
        self._closings += 1
        for key in kept:
            self._leave(_found(find(key)), left_by=None)
        return blocks

    def can_extend(self, name: str, num_blocks: int) -> bool:
        """Whether there is room behind the extent, or making it pays."""
        extent = self._extent_of(name)
        if extent is not None and self._stock.pool.are_free(extent.stop, num_blocks):
            return True
        return self._find_room(name, num_blocks) is not None

    def extend(self, name: str, num_blocks: int) -> list[int]:
        """Grows the extent of a table; other blocks of it may get other numbers before."""
        if num_blocks == 0:
            return []
        extent, table = self._extent_of(name), self._tables[name]
        if extent is None or not self._stock.pool.are_free(extent.stop, num_blocks):
            place = self._find_room(name, num_blocks)
            assert place is not None, "a table is extended without room"
            self._shift(place.shifts)
            extent = self._extent_of(name) or Extent(place.start, 0)
        blocks = list(range(extent.stop, extent.stop + num_blocks))
        for block in blocks:
            self._take(block)
        table.blocks += blocks
        return blocks

    def close(self, blocks: Sequence[int]) -> None:
        """Gives back blocks of one table, which it leaves in a row."""
        self._closings += 1
        for block in blocks:
            self._leave(block, left_by=self._closings)

    def check_integrity(self) -> None:
        """Every table holds one run of blocks of the device."""
        for name, table in self._tables.items():
            held = table.blocks[table.num_far :]
            assert all(b == a + 1 for a, b in pairwise(held)), f"{name} does not lie in a row"

    def _takes_in_place(self, demand: Demand) -> bool:
        """Whether a found run is to be taken where it lies: always when it cannot be copied."""
        found, references = demand.found, self._stock.pool.references
        if not found or _first_run(found) < len(found) or any(references(b or 0) for b in found):
            return False
        most = max(demand.num_blocks, demand.num_expected, self._copying_cost(found))
        if most > self._stock.pool.num_free:
            return True
        last = found[-1] or 0
        follows = last + 1 in self._stock.index and not references(last + 1)
        return not (follows and self._left_by[last + 1] == self._left_by[last])

    def _copying_cost(self, found: Sequence[int | None]) -> int:
        return len(found) + sum(len(run) for run in self._unheld_runs(found))

    def _unheld_runs(self, found: Sequence[int | None]) -> list[range]:
        """Consecutive ones of the found blocks that no table holds."""
        references = self._stock.pool.references
        runs: list[range] = []
        for block in sorted(b for b in found if b is not None and not references(b)):
            if runs and runs[-1].stop == block:
                runs[-1] = range(runs[-1].start, block + 1)
            else:
                runs.append(range(block, block + 1))
        return runs

    def _find_place(self, demand: Demand) -> Place | None:
        """Where a new table begins, or the room behind what is found in place."""
        runs = self._unheld_runs(demand.found)
        extents = self._extents([Extent(run.start, len(run)) for run in runs])
        others = [extent.length for extent in extents if extent.owner is not None]
        expected = max(demand.num_blocks, demand.num_expected)
        if self._takes_in_place(demand):
            own = next(e for e in extents if e.owner is None)
            sizes = [expected - own.length, demand.num_new]
            return self._room_behind(extents, own, sizes, is_alone=not others)
        sizes = [expected] if others else [expected, demand.num_blocks, len(demand.found)]
        return self._room_for_new(extents, sizes, is_alone=not others)

    def _find_room(self, name: str, num_blocks: int) -> Place | None:
        """Where the extent of a table can lie to grow by so many blocks."""
        extents, table = self._extents(), self._tables[name]
        is_alone = all(extent.owner == name for extent in extents)
        own = next((extent for extent in extents if extent.owner == name), None)
        if own is None:
            sizes = [max(num_blocks, table.goal), num_blocks]
            return self._room_for_new(extents, sizes, is_alone=True)
        wanted = table.goal - own.length if table.goal > own.length else own.length
        sizes = [max(num_blocks, wanted), max(num_blocks, wanted // 4), num_blocks]
        return self._room_behind(extents, own, sizes, is_alone=is_alone)

    def _room_for_new(
        self, extents: Sequence[Extent], sizes: Sequence[int], *, is_alone: bool
    ) -> Place | None:
        """A gap for the first of these sizes that fits, with spare room and not in what others have
        reserved if there is such a one.
        """
        spacious = sizes[0] + sizes[0] // 4 + 1
        tries = [(spacious, True), (sizes[0], True), *((size, False) for size in sizes)]
        for size, keep_reserved in tries:
            start = self._gap_for(extents, size, keep_reserved=keep_reserved)
            if start is not None:
                return Place(start)
        for size in sizes:
            room = cheapest_room(extents, size, self._num_blocks)
            if room is not None and (is_alone or room.num_copied <= COPIES_PER_BLOCK * size):
                return Place(room.start, room.shifts)
        return None

    def _room_behind(
        self,
        extents: Sequence[Extent],
        own: Extent,
        sizes: Sequence[int],
        *,
        is_alone: bool,
    ) -> Place | None:
        """The way to have one of these sizes behind an extent that copies least for each block."""
        behind, ways = extents.index(own) + 1, list[tuple[float, Place]]()
        for size in sizes:
            if self._stock.pool.are_free(own.stop, size):
                return Place(own.start)
            gap = self._gap_for(extents, own.length + size, keep_reserved=True)
            if gap is None:
                gap = self._gap_for(extents, own.length + size, keep_reserved=False)
            room = cheapest_room(extents, size, self._num_blocks, gap=behind)
            for copied, place in (
                (own.length, None if gap is None else Place(gap, (Shift(own, gap),))),
                (0, None) if room is None else (room.num_copied, Place(room.start, room.shifts)),
            ):
                if place is not None and (is_alone or copied <= COPIES_PER_BLOCK * size):
                    ways.append((copied / max(1, size), place))
        return min(ways, key=lambda way: way[0])[1] if ways else None

    def _gap_for(self, extents: Sequence[Extent], size: int, *, keep_reserved: bool) -> int | None:
        """The start of so many free blocks in a row of which the one used last was used longest
        ago.
        """
        best: tuple[int, int] | None = None
        for start, stop in gaps_between(extents, self._num_blocks, keep_reserved=keep_reserved):
            # Without regard for what is reserved, half of what is left stays before it.
            step = size if keep_reserved else self._num_blocks
            spare = 0 if keep_reserved else max(0, stop - size - start) // 2
            for first in range(start + spare, stop - size + 1, max(1, step)):
                used_at = max(self._used_at[first : first + size], default=0)
                if best is None or used_at < best[0]:
                    best = (used_at, first)
        return None if best is None else best[1]

    def _extents(self, others: Sequence[Extent] = ()) -> list[Extent]:
        """All extents in the order of their blocks."""
        found = [one for name in self._tables if (one := self._extent_of(name)) is not None]
        return sorted([*found, *others])

    def _extent_of(self, name: str) -> Extent | None:
        table = self._tables[name]
        length = len(table.blocks) - table.num_far
        if not length:
            return None
        start, is_fixed = table.blocks[table.num_far], self._is_arriving(name)
        return Extent(start, length, name, table.goal, is_fixed)

    def _shift(self, shifts: Sequence[Shift]) -> None:
        """Moves extents; blocks in the order in which none is overwritten before it was copied."""
        for extent, start in shifts:
            offsets = range(extent.length) if start < extent.start else range(extent.length)[::-1]
            for offset in offsets:
                self._move(extent.start + offset, start + offset)
                if extent.owner is not None:
                    table = self._tables[extent.owner]
                    place = table.num_far + offset
                    table.blocks[place] = start + offset
                    self._moves.renumber(extent.owner, self._group, place, start + offset)

    def _move(self, source: int, target: int) -> None:
        self._stock.move(source, target)
        self._used_at[target], self._left_by[target] = 0, self._left_by[source]
        self._order_copy(source, target)

    def _order_copy(self, source: int, target: int) -> None:
        self.num_copied += 1
        self._moves.copies.append(UnitMove(self._group, source, target))

    def _take(self, block: int) -> None:
        self._stock.take_at(block)
        self._used_at[block] = self._left_by[block] = 0

    def _leave(self, block: int, *, left_by: int | None) -> None:
        """Gives a block back; `left_by` None leaves what it belongs to as it was."""
        self._stock.release(block)
        self._used_at[block] = self._closings if block in self._stock.index else 0
        if left_by is not None:
            self._left_by[block] = left_by


def _first_run(found: Sequence[int | None]) -> int:
    """How many of the first blocks lie in a row."""
    first, length = found[0] if found else None, 0
    while first is not None and length < len(found) and found[length] == first + length:
        length += 1
    return length


def _found(block: int | None) -> int:
    assert block is not None, "a found block was evicted while it was taken"
    return block
