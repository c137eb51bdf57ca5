from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.prefix_index import PrefixKey
from firstlight.cache.snapshot_values import MOST_USES, SnapshotValues


def key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(32, "little"))


def make_values(*gone: int) -> SnapshotValues:
    return SnapshotValues(lambda found: found not in {key(number) for number in gone})


def test_a_long_snapshot_outlives_a_newer_short_one() -> None:
    values = make_values()
    values.enter(1, key(1), num_blocks=9, uses=1)
    values.enter(2, key(2), num_blocks=3, uses=1)
    assert values.choose_victim() == 2


def test_what_is_used_outlives_what_is_long() -> None:
    values = make_values()
    values.enter(1, key(1), num_blocks=9, uses=1)
    values.enter(2, key(2), num_blocks=4, uses=1)
    values.use(2), values.use(2)
    assert values.choose_victim() == 1 and not values.is_fresh(2) and values.is_fresh(1)


def test_of_equals_the_one_unused_longest_goes() -> None:
    values = make_values()
    for slot in (3, 1, 2):
        values.enter(slot, key(slot), num_blocks=4, uses=1)
    assert values.choose_victim() == 3 and values.choose_victim(spare=3) == 1


def test_a_snapshot_without_its_pages_goes_first() -> None:
    values = make_values(1)
    values.enter(1, key(1), num_blocks=99, uses=9)
    values.enter(2, key(2), num_blocks=1, uses=1)
    assert values.choose_victim() == 1


def test_the_spared_one_goes_when_it_is_the_last() -> None:
    values = make_values()
    values.enter(1, key(1), num_blocks=4, uses=1)
    assert values.choose_victim(spare=1) == 1


@given(uses=st.integers(0, 100), length=st.integers(1, 20))
def test_what_is_no_longer_used_is_given_up_in_the_end(uses: int, length: int) -> None:
    values = make_values()
    values.enter(0, key(0), num_blocks=length, uses=1)
    for _ in range(uses):
        values.use(0)
    for slot in range(1, MOST_USES * length + 2):
        values.enter(slot, key(slot), num_blocks=1, uses=1)
        victim = values.choose_victim()
        values.remove(victim)
        if victim == 0:
            return
    raise AssertionError("an idle snapshot is never given up")
