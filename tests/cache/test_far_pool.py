from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.far_pool import FarPool, FarSizes
from firstlight.cache.moves import UnitMove
from firstlight.cache.prefix_index import PrefixKey


def key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(4, "little"))


def make_pool(host: int, disk: int) -> tuple[FarPool, list[UnitMove]]:
    moves: list[UnitMove] = []
    return FarPool(1, 100, FarSizes(host, disk), moves), moves


def test_what_is_unused_longest_goes_to_disk_and_then_for_good() -> None:
    pool, moves = make_pool(2, 1)
    for number in range(4):
        pool.keep(key(number), source=number)
    places = [pool.find(key(number)) for number in range(4)]
    assert places == [None, 102, 100, 101] or places == [None, 102, 101, 100]
    assert moves[:2] == [(1, 0, 100), (1, 1, 101)]
    assert moves[2:4] == [(1, 100, 102), (1, 2, 100)], "out before in"
    host, disk = pool.usage()
    assert (host.cached, disk.cached, disk.dropped) == (2, 1, 1)


def test_what_is_held_stays_where_it_is() -> None:
    pool, _ = make_pool(2, 1)
    pool.keep(key(0), source=1)
    unit = pool.hold(pool.find(key(0)) or 0)
    for number in range(1, 9):
        pool.keep(key(number), source=number)
    assert pool.find(key(0)) == unit == 100
    pool.check_integrity(Counter([unit]))


def test_what_is_lost_is_found_no_more_and_its_place_is_used() -> None:
    pool, _ = make_pool(1, 0)
    pool.keep(key(0), source=1)
    pool.lose(100)
    assert pool.find(key(0)) is None and pool.usage()[0].lost == 1
    assert pool.store(5) == 100 and pool.store(6) is None
    pool.lose(100)
    pool.check_integrity(Counter([100]))


steps = st.lists(
    st.tuples(st.sampled_from(["keep", "hold", "release", "lose", "store", "discard"]),
              st.integers(0, 12)),
    max_size=60,
)  # fmt: skip


@given(host=st.integers(0, 4), disk=st.integers(0, 6), steps=steps)
def test_any_use_leaves_every_unit_counted(
    host: int, disk: int, steps: list[tuple[str, int]]
) -> None:
    pool, moves = make_pool(host, disk)
    held: list[int] = []
    content: dict[int, int] = {}  # what each unit holds, by carrying out the moves
    for step, number in steps:
        if step == "keep":
            content[number] = number
            pool.keep(key(number), source=number)
        elif step == "store" and (unit := pool.store(number)) is not None:
            held.append(unit)
        elif step == "hold" and (found := pool.find(key(number))) is not None:
            held.append(pool.hold(found))
        elif step == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif step == "lose" and (lost := pool.find(key(number))) is not None:
            pool.lose(lost)
        elif step == "discard":
            pool.discard(key(number))
        for _, source, target in moves:
            content[target] = content.get(source, source)
        moves.clear()
        pool.check_integrity(Counter(held))
        for one in range(13):
            unit = pool.find(key(one))
            assert unit is None or content[unit] == one, "a unit holds something else"
