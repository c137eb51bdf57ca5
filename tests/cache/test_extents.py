"""Room among extents: it is there once the shifts were carried out, and nothing cheaper is."""

from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.extents import Extent, cheapest_room, gaps_between


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Extent], int]:
    """Extents in order, with gaps before, between and behind them; and the number of blocks."""
    extents: list[Extent] = []
    start = 1
    for index in range(draw(st.integers(0, 6))):
        start += draw(st.integers(0, 4))
        length = draw(st.integers(1, 5))
        is_fixed = draw(st.integers(0, 4)) == 0
        extents.append(Extent(start, length, str(index), is_fixed=is_fixed))
        start += length
    return extents, start + draw(st.integers(0, 4))


def shifted(extents: list[Extent], shifts: object) -> list[Extent]:
    """Carries out shifts one by one; none may overwrite another extent."""
    now = {extent.owner: extent for extent in extents}
    for extent, start in shifts:  # type: ignore[attr-defined]
        assert now[extent.owner] == extent and not extent.is_fixed
        moved = extent._replace(start=start)
        others = [one for one in now.values() if one.owner != extent.owner]
        assert all(one.stop <= start or moved.stop <= one.start for one in others)
        now[extent.owner] = moved
    return sorted(now.values())


def least_copied(extents: list[Extent], gaps: list[int], size: int, gap: int | None) -> int | None:
    """Tries all rows of gaps."""
    costs = []
    for first in range(len(gaps)):
        for last in range(first, len(gaps)):
            moving = extents[first:last]
            holds = gap is None or first <= gap <= last
            if (
                holds
                and sum(gaps[first : last + 1]) >= size
                and not any(e.is_fixed for e in moving)
            ):
                costs.append(sum(extent.length for extent in moving))
    return min(costs, default=None)


@given(layouts(), st.integers(1, 12), st.integers(0, 6))
def test_room_is_made_with_fewest_copies(
    layout: tuple[list[Extent], int], size: int, which: int
) -> None:
    extents, num_blocks = layout
    gaps = [stop - start for start, stop in gaps_between(extents, num_blocks)]
    for gap in (None, which) if which < len(gaps) else (None,):
        room, least = (
            cheapest_room(extents, size, num_blocks, gap=gap),
            least_copied(extents, gaps, size, gap),
        )
        assert (room is None) == (least is None)
        if room is None or least is None:
            continue
        now = shifted(extents, room.shifts)
        assert room.num_copied <= least and room.stop - room.start >= size
        assert (room.start, room.stop) in gaps_between(now, num_blocks)
        if gap is not None:
            assert (room.start, room.stop) == gaps_between(now, num_blocks)[gap]


def test_those_that_move_get_room_too() -> None:
    extents = [Extent(1, 2, "a"), Extent(3, 2, "b"), Extent(5, 2, "c")]
    room = cheapest_room(extents, 3, 16, gap=1)
    assert room is not None and (room.start, room.stop) == (3, 8)
    assert [(one.extent.owner, one.start) for one in room.shifts] == [("c", 12), ("b", 8)]


def test_what_is_reserved_is_left_out_of_gaps() -> None:
    extents = [Extent(1, 2, "a", reserved=6), Extent(9, 1, "b", reserved=20)]
    assert gaps_between(extents, 12) == [(1, 1), (3, 9), (10, 12)]
    assert gaps_between(extents, 12, keep_reserved=True) == [(1, 1), (7, 9), (29, 29)]
