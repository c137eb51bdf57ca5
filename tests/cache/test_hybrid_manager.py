"""Paged and recurrent groups together: one count of computed tokens."""

import pytest

from cached_sequence import Sequence
from firstlight.cache.cache_group import BlockCounts, SlotCopy
from firstlight.cache.manager import CacheManager
from firstlight.sharding.state_spec import LatentState, RecurrentState

LATENT, RECURRENT = LatentState(8), RecurrentState(2, 4, 4, 24, 3)


def make_cache(num_blocks: int = 17, num_slots: int = 5) -> CacheManager:
    return CacheManager(
        (RECURRENT, LATENT),
        num_blocks=num_blocks,
        block_size=4,
        model_digest="model",
        num_slots=num_slots,
    )


def advance(cache: CacheManager, sequence: Sequence) -> list[SlotCopy]:
    """One clean step to the snapshot point if there is one, else to the end; returns its saves."""
    if cache.blocks(sequence)[0] == []:
        sequence.num_computed = cache.lookup(sequence)
    stop = cache.snapshot_point(sequence) or len(sequence.token_ids)
    assert cache.grow(sequence, stop) is not None
    cache.take_restores()
    saves = cache.save(sequence, stop)
    cache.commit(sequence, stop)
    sequence.num_computed = stop
    cache.check_integrity()
    return saves


def test_the_state_is_kept_where_a_repetition_can_use_it() -> None:
    cache = make_cache()
    for length, point in ((4, None), (5, 4), (12, 8), (13, 12)):
        assert cache.snapshot_point(Sequence("x", list(range(length)))) == point
    first = Sequence("a", list(range(13)))
    assert advance(cache, first) == [SlotCopy(0, 1, 2)] and first.num_computed == 12
    assert advance(cache, first) == [] and cache.snapshot_point(first) is None
    assert cache.lookup(Sequence("b", list(range(13)))) == 12


def test_without_a_snapshot_pages_alone_are_no_reuse() -> None:
    cache = make_cache()
    first = Sequence("a", list(range(21)))
    advance(cache, first), advance(cache, first)
    assert cache.lookup(Sequence("b", list(range(16)))) == 0
    assert cache.lookup(Sequence("b", list(range(21)))) == 20


def test_without_pages_a_snapshot_alone_is_no_reuse() -> None:
    cache = make_cache(num_blocks=5)
    first = Sequence("a", list(range(13)))
    advance(cache, first), advance(cache, first)
    cache.release(first)
    advance(cache, Sequence("other", list(range(50, 66))))
    assert cache.usage().slots is not None and cache.usage().slots.cached == 2
    assert cache.lookup(Sequence("b", list(range(13)))) == 0


def test_a_start_behind_a_snapshot_shares_pages_and_restores_the_state() -> None:
    cache = make_cache()
    first, second = Sequence("a", list(range(13))), Sequence("b", [*range(13), 99])
    advance(cache, first)
    second.num_computed = cache.lookup(second)
    blocks = cache.grow(second, 14)
    assert second.num_computed == 12 and blocks is not None
    assert blocks[1][:3] == cache.blocks(first)[1] and blocks[0] == [3]
    assert cache.take_restores() == [SlotCopy(0, 2, 3)]
    assert cache.grow(second, 17) == [[], [5]]


@pytest.mark.parametrize(("num_slots", "starts"), [(3, 2), (4, 3)])
def test_slots_bound_how_many_run_and_growth_is_all_or_nothing(num_slots: int, starts: int) -> None:
    cache = make_cache(num_slots=num_slots)
    for name in range(starts):
        assert cache.can_start and cache.grow(Sequence(str(name), [name] * 5), 4) is not None
    before = cache.usage()
    assert not cache.can_start and cache.grow(Sequence("late", [9] * 5), 4) is None
    assert cache.usage() == before
    cache.release(Sequence("0", []))
    assert cache.can_start


def test_no_step_is_cut_for_a_snapshot_that_cannot_be_kept() -> None:
    cache = make_cache(num_slots=3)
    first, second = Sequence("a", list(range(9))), Sequence("b", list(range(50, 59)))
    assert cache.snapshot_point(first) == 8
    cache.grow(first, 4)
    assert cache.snapshot_point(first) == 8 and cache.snapshot_point(second) is None
    cache.grow(second, 4)
    assert cache.snapshot_point(first) is None and cache.save(first, 8) == []


def test_blocks_are_what_the_counts_of_a_hybrid_cache_mean() -> None:
    cache = make_cache(num_blocks=17, num_slots=3)
    assert cache.max_tokens == 64 and cache.free_blocks == BlockCounts((16,))
    cache.grow(Sequence("a", [1] * 9), 8)
    usage = cache.usage()
    assert usage.used_share == 2 / 16 and cache.free_blocks == BlockCounts((14,))
    assert usage.slots is not None and (usage.slots.used, usage.slots.usable) == (1, 2)


def test_groups_are_asked_until_all_agree() -> None:
    other = RecurrentState(1, 4, 4, 12, 3)
    cache = CacheManager(
        (LATENT, RECURRENT, other), num_blocks=17, block_size=4, model_digest="m", num_slots=6
    )
    for length in (9, 13):
        sequence = Sequence(str(length), list(range(length)))
        while sequence.num_computed < length:
            advance(cache, sequence)
    chain = Sequence("x", list(range(13)))
    assert cache.lookup(chain) == 12 and chain.prefix_chain is not None
    for group, num_blocks in ((1, 2), (2, 3)):  # one keeps 12 tokens only, the other 8
        held = cache._recurrent[group]
        slot = held._index.find(chain.prefix_chain.key(num_blocks - 1))
        assert slot is not None and held._forget(slot)
    assert cache.lookup(chain) == 0
