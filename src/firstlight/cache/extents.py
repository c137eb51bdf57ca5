"""Owns where runs of consecutive blocks lie, and what has to move to make room among them.

Pure arithmetic; knows no content. Extents lie in the order of their blocks, gaps between them:

    blocks    1 ..... | extent 0 | ..... | extent 1 | ..... N
    gaps         0                  1                  2
"""

from collections.abc import Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """Blocks [start, start + length) of `owner` (None: content that is only kept for a moment).
    `reserved` blocks from its start on are kept free of others while there is room elsewhere; a
    fixed one may not move.
    """

    start: int
    length: int
    owner: str | None = None
    reserved: int = 0
    is_fixed: bool = False

    @property
    def stop(self) -> int:
        """The block behind it."""
        return self.start + self.length


class Shift(NamedTuple):
    """An extent is to move to another start, which may overlap with where it lies."""

    extent: Extent
    start: int


class Room(NamedTuple):
    """Free blocks [start, stop), once the shifts were carried out in their order."""

    start: int
    stop: int
    shifts: tuple[Shift, ...] = ()

    @property
    def num_copied(self) -> int:
        """Blocks that the shifts copy."""
        return sum(shift.extent.length for shift in self.shifts)


def gaps_between(
    extents: Sequence[Extent], num_blocks: int, *, keep_reserved: bool = False
) -> list[tuple[int, int]]:
    """The free blocks [start, stop) before, between and behind extents, empty ones included.
    `keep_reserved` leaves out what extents have reserved.
    """
    starts = [1, *(e.start + max(e.length, e.reserved * keep_reserved) for e in extents)]
    stops = [*(extent.start for extent in extents), num_blocks]
    return [(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def cheapest_room(
    extents: Sequence[Extent], size: int, num_blocks: int, *, gap: int | None = None
) -> Room | None:
    """The room of at least `size` blocks for which fewest have to be copied, in this gap or in any;
    None where fixed extents or too few free blocks leave none.

    Extents between the first and the last gap of a row may all have to move; what that copies does
    not depend on where they come to lie.
    """
    gaps = [stop - start for start, stop in gaps_between(extents, num_blocks)]
    best: tuple[int, int, int] | None = None
    first = total = copied = 0
    for last, width in enumerate(gaps):
        if last and extents[last - 1].is_fixed:
            first, total, copied = last, 0, 0
        elif last:
            copied += extents[last - 1].length
        total += width
        while first < (last if gap is None else min(last, gap)) and total - gaps[first] >= size:
            total -= gaps[first]
            copied -= extents[first].length
            first += 1
        holds_gap = gap is None or first <= gap <= last
        if total >= size and holds_gap and (best is None or copied < best[0]):
            best = (copied, first, last)
    if best is None:
        return None
    _, first, last = best
    split = last if gap is None else gap
    return _push_apart(extents, num_blocks, range(first, last), split=split, size=size)


def _push_apart(
    extents: Sequence[Extent], num_blocks: int, moving: range, *, split: int, size: int
) -> Room:
    """Makes gap `split` at least `size` blocks wide, and gives each extent before one of the other
    gaps an equal part of what is left to grow into: or the next of them would need room at once.
    """
    low = extents[moving.start - 1].stop if moving.start else 1
    high = extents[moving.stop].start if moving.stop < len(extents) else num_blocks
    free = high - low - sum(extents[index].length for index in moving)
    gaps = range(moving.start, moving.stop + 1)
    share = (free - size) // max(1, sum(1 for gap in gaps if gap))
    widths = {gap: share if gap else 0 for gap in gaps if gap != split}
    widths[split] = free - sum(widths.values())
    start, shifts = low, list[Shift]()
    for index in moving:
        start += widths[index]
        shifts.append(Shift(extents[index], start))
        start += extents[index].length
    before = sum(widths[gap] for gap in gaps if gap < split)
    first = low + before + sum(extents[index].length for index in moving if index < split)
    down = [shift for shift in shifts if shift.start < shift.extent.start]
    up = [shift for shift in reversed(shifts) if shift.start > shift.extent.start]
    return Room(first, first + widths[split], (*down, *up))
