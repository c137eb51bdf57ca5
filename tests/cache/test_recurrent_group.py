from typing import Any

import pytest

from firstlight.cache.cache_group import SlotCopy
from firstlight.cache.prefix_index import PrefixChain, PrefixScope
from firstlight.cache.recurrent_group import RecurrentGroup
from firstlight.errors import OutOfBudget
from firstlight.sharding.state_spec import RecurrentState

SPEC = RecurrentState(2, 4, 4, 24, 3)
SCOPE = PrefixScope("model", 4, "")


def make_group(num_slots: int = 5) -> RecurrentGroup:
    return RecurrentGroup(SPEC, index=3, num_slots=num_slots, block_size=4)


def chain(first: int, length: int = 40) -> PrefixChain:
    """The first block of each differs, so nothing is shared between two of them."""
    return PrefixChain(SCOPE, [first, *range(length - 1)])


def keep(group: RecurrentGroup, name: str, prefix: PrefixChain, num_blocks: int) -> int:
    """Computes a prefix, keeps its state, ends the request; returns the slot of the snapshot."""
    group.start(name, prefix, 0, num_blocks)
    copy = group.save(name, prefix, num_blocks)
    assert copy is not None
    group.enter(name, prefix, range(num_blocks))
    group.release(name)
    group.check_integrity({})
    return copy.target


def test_a_sequence_holds_one_slot_whatever_its_length() -> None:
    group = make_group()
    assert group.start("a", chain(1), 0, 3) == [1] == list(group.table("a"))
    assert group.extend("a", 5) == [] and group.take_restores() == []
    assert (group.num_usable, group.num_free, group.cost(chain(2), 0, 9)) == (4, 3, 1)
    group.release("a")
    assert group.num_free == 4


def test_a_snapshot_is_found_once_it_is_entered_and_at_its_length_only() -> None:
    group, prefix = make_group(), chain(1)
    group.start("a", prefix, 0, 3)
    copy = group.save("a", prefix, 3)
    assert copy == SlotCopy(3, 1, 2) and group.reusable_tokens(prefix, 40) == 0
    group.enter("a", prefix, range(1, 3))
    for at_most, found in ((40, 12), (12, 12), (11, 0)):
        assert group.reusable_tokens(chain(1), at_most) == found
    assert group.reusable_tokens(chain(2), 40) == 0
    group.check_integrity({"a": 3})


def test_the_longest_snapshot_counts() -> None:
    group, prefix = make_group(num_slots=6), chain(1)
    for num_blocks in (2, 5, 3):
        keep(group, "a", prefix, num_blocks)
    keep(group, "b", chain(2), 6)
    assert [group.reusable_tokens(prefix, n * 4) for n in (9, 5, 4, 2, 1)] == [20, 20, 12, 8, 0]


def test_a_start_behind_a_snapshot_copies_it_to_the_new_live_slot() -> None:
    group, prefix = make_group(), chain(1)
    snapshot = keep(group, "a", prefix, 2)
    slots = [group.start(name, prefix, 2, 3)[0] for name in "bc"]
    assert group.take_restores() == [SlotCopy(3, snapshot, slot) for slot in slots]
    assert len({snapshot, *slots}) == 3 and group.take_restores() == []
    assert group.reusable_tokens(prefix, 40) == 8 and group.usage().hits == 2


def test_the_last_free_slot_becomes_live_even_if_it_is_the_snapshot_to_start_from() -> None:
    group, prefix = make_group(num_slots=3), chain(1)
    snapshot = keep(group, "a", prefix, 2)
    group.start("other", chain(2), 0, 1)
    assert group.start("b", prefix, 2, 3) == [snapshot]
    assert group.take_restores() == [] and group.reusable_tokens(prefix, 40) == 0


def test_a_snapshot_may_go_in_the_very_plan_that_restores_from_it() -> None:
    group, prefix = make_group(num_slots=3), chain(1)
    snapshot = keep(group, "a", prefix, 2)
    (live,) = group.start("b", prefix, 2, 3)
    assert group.start("c", chain(2), 0, 1) == [snapshot]
    assert group.take_restores() == [SlotCopy(3, snapshot, live)]
    assert group.reusable_tokens(prefix, 40) == 0
    group.check_integrity({"b": 0, "c": 0})


def test_the_snapshot_unused_longest_goes_first() -> None:
    group = make_group(num_slots=5)
    prefixes = [chain(n) for n in range(3)]
    for n, prefix in enumerate(prefixes):
        keep(group, str(n), prefix, 2)
    group.start("again", prefixes[0], 2, 3)  # takes the one empty slot
    group.start("new", chain(6), 0, 1)
    assert [group.reusable_tokens(prefix, 40) for prefix in prefixes] == [8, 0, 8]
    group.start("newer", chain(7), 0, 1)
    assert [group.reusable_tokens(prefix, 40) for prefix in prefixes] == [8, 0, 0]
    assert group.usage().evictions == 2


def test_no_snapshot_is_made_twice_or_without_a_free_slot() -> None:
    group, prefix = make_group(num_slots=4), chain(1)
    for name in "ab":
        group.start(name, prefix, 0, 2)
    assert group.save("a", prefix, 2) is not None
    assert group.save("b", prefix, 2) is None
    group.enter("a", prefix, range(2))
    assert group.save("b", prefix, 2) is None and group.num_free == 1


def test_of_two_equal_snapshots_under_way_the_first_stays() -> None:
    group, prefix = make_group(), chain(1)
    for name in "ab":
        group.start(name, prefix, 0, 2)
    copies = [group.save(name, prefix, 2) for name in "ab"]
    for name in "ab":
        group.enter(name, prefix, range(2))
        group.check_integrity({"a": 2, "b": 2})
    assert copies[0] is not None and group.usage().cached == 1 and group.num_free == 2
    group.start("c", prefix, 2, 3)
    assert group.take_restores()[0].source == copies[0].target


def test_who_ends_while_its_snapshot_is_under_way_leaves_none() -> None:
    group, prefix = make_group(), chain(1)
    group.start("a", prefix, 0, 2)
    group.save("a", prefix, 2)
    group.release("a")
    group.check_integrity({})
    assert group.num_free == 4 and group.reusable_tokens(prefix, 40) == 0


@pytest.mark.parametrize("role", ["made it", "started from it"])
def test_what_failed_takes_its_snapshots_along(role: str) -> None:
    group, prefix, other = make_group(), chain(1), chain(2)
    kept = keep(group, "other", other, 2)
    if role == "made it":
        group.start("a", prefix, 0, 2)
        group.save("a", prefix, 2)
        group.enter("a", prefix, range(2))
    else:
        keep(group, "first", prefix, 2)
        group.start("a", prefix, 2, 3)
        group.take_restores()
    group.discard("a")
    group.release("a")
    group.check_integrity({})
    assert group.reusable_tokens(prefix, 40) == 0 and group.reusable_tokens(other, 40) == 8
    fresh = [group.start(name, chain(9), 0, 1)[0] for name in "xyz"]
    assert kept not in fresh


def test_a_group_needs_a_slot_beside_the_reserved_one() -> None:
    with pytest.raises(OutOfBudget, match="1 slots of recurrent state"):
        make_group(num_slots=1)


@pytest.mark.parametrize("damage", ["reference", "length", "findable", "lost"])
def test_check_integrity_finds_damage(damage: str) -> None:
    group: Any = make_group()
    snapshot = keep(group, "old", chain(2), 2)
    group.start("a", chain(1), 0, 2)
    group.save("a", chain(1), 2)
    group.check_integrity({"a": 0})
    if damage == "reference":
        group._pool.share(snapshot)
    elif damage == "length":
        group._values.remove(snapshot)
    elif damage == "findable":
        group._index.enter(b"key", group.table("a")[0])
        group._values.enter(group.table("a")[0], b"key", num_blocks=2, uses=1)
    else:
        group._live["a"].saving = None
    with pytest.raises(AssertionError):
        group.check_integrity({"a": 0})
