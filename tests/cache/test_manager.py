from typing import Any

import pytest

from cached_sequence import Sequence
from firstlight.cache.cache_group import BlockCounts
from firstlight.cache.manager import CacheManager, blocks_for, distinct_specs
from firstlight.errors import ConfigError, UsageError
from firstlight.schedule.request import MediaItem
from firstlight.sharding.state_spec import (
    EncoderState,
    GroupedQueryState,
    LatentState,
    RecurrentState,
)

FULL = GroupedQueryState(kv_heads=2, head_dim=4)
WINDOW = GroupedQueryState(kv_heads=2, head_dim=4, window=64)  # wider than any prompt here


def make_cache(num_blocks: int = 9, *specs: GroupedQueryState) -> CacheManager:
    groups = specs or (FULL, WINDOW)
    return CacheManager(groups, num_blocks=num_blocks, block_size=4, model_digest="model")


def compute(cache: CacheManager, sequence: Sequence, num_tokens: int | None = None) -> int:
    """Serves a sequence up to `num_tokens` and returns how many of them were cached."""
    num_tokens = num_tokens or len(sequence.token_ids)
    num_cached = sequence.num_computed = cache.lookup(sequence)
    assert cache.grow(sequence, num_tokens) is not None
    cache.commit(sequence, num_tokens)
    cache.check_integrity()
    return num_cached


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_prefix_is_reused_in_whole_blocks_and_never_to_the_last_token() -> None:
    cache = make_cache()
    assert compute(cache, Sequence("a", tokens(12))) == 0
    for count, reused in ((12, 8), (13, 12), (11, 8), (4, 0), (5, 4), (1, 0)):
        assert cache.lookup(Sequence("b", tokens(count))) == reused
    assert cache.lookup(Sequence("b", tokens(7) + [99] * 6)) == 4


def test_shared_blocks_are_the_same_in_every_group_and_new_ones_are_not() -> None:
    cache = make_cache()
    first, second = Sequence("a", tokens(12)), Sequence("b", tokens(14))
    compute(cache, first)
    assert compute(cache, second) == 12
    for mine, theirs in zip(cache.blocks(first), cache.blocks(second), strict=True):
        assert mine == theirs[:3] and theirs[3] not in mine


@pytest.mark.parametrize(
    "changes",
    [
        {"salt": "s"},
        {"media": (MediaItem(first=0, count=2, digest="a", grid=(1, 2, 2), patches=b""),)},
        {"most_reused": 3},
    ],
)
def test_nothing_is_reused_across(changes: dict[str, Any]) -> None:
    cache = make_cache()
    compute(cache, Sequence("a", tokens(12)))
    assert cache.lookup(Sequence("b", tokens(12), **changes)) == 0


def test_blocks_are_found_only_after_their_commit() -> None:
    cache = make_cache()
    first = Sequence("a", tokens(12))
    cache.grow(first, 12)
    assert cache.lookup(Sequence("b", tokens(12))) == 0
    cache.commit(first, 7)
    assert cache.lookup(Sequence("b", tokens(12))) == 4
    cache.release(first)
    assert cache.lookup(Sequence("b", tokens(12))) == 4


def test_two_at_once_write_blocks_of_their_own() -> None:
    cache = make_cache()
    first, second = Sequence("a", tokens(8)), Sequence("b", tokens(8))
    for sequence in (first, second):
        cache.grow(sequence, 8)
    for sequence in (first, second):
        cache.commit(sequence, 8)
        cache.check_integrity()
    assert not set(cache.blocks(first)[0]) & set(cache.blocks(second)[0])
    cache.release(first)
    cache.release(second)
    usage = cache.usage().groups[0]
    assert (usage.used, usage.cached, usage.empty) == (0, 2, 6)


def test_growth_is_all_or_nothing() -> None:
    cache = make_cache(num_blocks=4)
    first, second = Sequence("a", tokens(8)), Sequence("b", tokens(8, first=50))
    assert cache.grow(first, 8) == [[1, 2], [1, 2]]
    before = cache.usage()
    assert cache.grow(second, 5) is None and cache.grow(first, 13) is None
    assert cache.usage() == before and cache.blocks(second) == [[], []]
    assert cache.grow(first, 8) == [] and cache.grow(first, 12) == [[3], [3]]
    cache.check_integrity()


def test_reused_blocks_that_nobody_holds_count_as_taken() -> None:
    cache = make_cache(num_blocks=4)
    first = Sequence("a", tokens(12))
    compute(cache, first)
    cache.release(first)
    longer = Sequence("b", tokens(16))
    longer.num_computed = cache.lookup(longer)
    assert longer.num_computed == 12
    assert (
        cache.needs(longer, 16, num_cached=12) == BlockCounts((4, 4))
        and cache.grow(longer, 16) is None
    )
    cache.check_integrity()
    assert cache.usage().groups[0].cached == 3


def test_the_end_of_the_oldest_prefix_is_evicted_first() -> None:
    cache = make_cache(num_blocks=7)
    for name, first in (("a", 0), ("b", 100)):
        sequence = Sequence(name, tokens(12, first))
        compute(cache, sequence)
        cache.release(sequence)
    compute(cache, Sequence("c", tokens(4, first=200)))
    assert cache.lookup(Sequence("d", tokens(13))) == 8
    assert cache.lookup(Sequence("d", tokens(13, first=100))) == 12
    assert cache.usage().groups[0].evictions == 1


def test_the_least_of_the_groups_counts() -> None:
    cache = make_cache()
    first = Sequence("a", tokens(12))
    compute(cache, first)
    group: Any = cache._groups[1]
    group._index.discard(group.table("a")[1])
    assert cache.lookup(Sequence("b", tokens(12))) == 4


def test_what_failed_is_found_no_more_and_its_other_users_go_on() -> None:
    cache = make_cache()
    first, second = Sequence("a", tokens(9)), Sequence("b", tokens(9))
    compute(cache, first)
    assert compute(cache, second) == 8
    cache.discard(second)
    cache.check_integrity()
    assert cache.lookup(Sequence("c", tokens(9))) == 0
    first.token_ids += tokens(3, first=9)
    assert cache.grow(first, 12) == []
    cache.commit(first, 12)
    cache.release(first)
    cache.check_integrity()
    assert cache.usage().groups[0].used == 0


def test_what_fits() -> None:
    cache = make_cache(num_blocks=4)
    assert cache.can_ever_fit(12) and not cache.can_ever_fit(13) and cache.max_tokens == 12
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    cache.grow(Sequence("a", tokens(9)), 6)
    assert cache.usage().used_share == pytest.approx(2 / 3)
    cache.release(Sequence("never held anything", [1]))


def test_groups_are_the_distinct_states_of_the_layers() -> None:
    assert distinct_specs([FULL, WINDOW, None, FULL]) == [FULL, WINDOW]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "no layer that keeps state"),
        ([FULL, FULL], "given twice"),
        ([FULL, LatentState(8), EncoderState(8)], "keeps encoder"),
        ([RecurrentState(1, 2, 3, 4, 5)], "recurrent state only"),
    ],
)
def test_states_it_cannot_hold_are_refused(groups: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheManager(groups, num_blocks=4, block_size=4, model_digest="model")


def test_a_block_holds_at_least_a_token() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        CacheManager([FULL], num_blocks=4, block_size=0, model_digest="model")


@pytest.mark.parametrize("damage", ["reference", "table", "findable", "capacity", "cached"])
def test_check_integrity_finds_damage(damage: str) -> None:
    cache = make_cache()
    sequence = Sequence("a", tokens(10))
    compute(cache, sequence)
    group: Any = cache._groups[0]
    if damage == "reference":
        group._pool.share(group.table("a")[0])
    elif damage == "table":
        group._tables["b"] = []
    elif damage == "findable":
        group._index.enter(b"key", group.table("a")[2])
    elif damage == "capacity":
        cache._holdings["a"].capacity += 4
    else:
        group._stock.num_cached += 1
    with pytest.raises(AssertionError):
        cache.check_integrity()
