"""What is counted of a cache: hit rates, fragmentation, idle times and bytes."""

from dataclasses import dataclass

import pytest

from cached_sequence import Sequence
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.idle_times import IdleTimes, IdleTotals
from firstlight.cache.manager import CacheManager
from firstlight.sharding.state_spec import LatentState, RecurrentState, StateSpec

LATENT, RECURRENT = LatentState(8), RecurrentState(2, 4, 4, 24, 3)


@dataclass
class Clock:
    """Seconds that the test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def make_cache(*specs: StateSpec, num_blocks: int = 9, clock: Clock | None = None) -> CacheManager:
    options = CacheOptions(unit_bytes=(10, 20)[: len(specs)], clock=clock or Clock())
    return CacheManager(
        specs,
        num_blocks=num_blocks,
        block_size=4,
        model_digest="model",
        num_slots=3,
        options=options,
    )


def serve(cache: CacheManager, sequence: Sequence) -> None:
    """Computes a sequence without a word of its state, and ends it."""
    sequence.num_computed = cache.lookup(sequence)
    assert cache.grow(sequence, len(sequence.token_ids)) is not None
    cache.take_restores()
    cache.commit(sequence, len(sequence.token_ids))
    cache.release(sequence)


def test_idle_times_are_summed_by_what_ends_them() -> None:
    clock = Clock()
    times = IdleTimes(3, clock)
    times.rest(1), times.rest(2)
    clock.now = 5.0
    times.reuse(1), times.evict(2)
    assert times.totals == IdleTotals(1, 5.0, 1, 5.0)


def test_the_age_at_eviction_and_the_gap_of_reuse_are_those_of_the_blocks() -> None:
    clock = Clock()
    cache = make_cache(LATENT, num_blocks=5, clock=clock)
    serve(cache, Sequence("a", list(range(9))))
    clock.now = 3.0
    serve(cache, Sequence("b", list(range(9))))
    idle = cache.usage().groups[0].idle
    assert (idle.num_reused, idle.reused_seconds, idle.num_evicted) == (2, 6.0, 0)
    clock.now = 10.0
    serve(cache, Sequence("c", list(range(50, 66))))
    idle = cache.usage().groups[0].idle
    assert (idle.num_evicted, idle.evicted_seconds) == (2, 14.0)


def test_each_group_says_what_it_alone_could_have_given() -> None:
    cache = make_cache(LATENT, RECURRENT)
    for name in "ab":  # no snapshot is made, so nothing is reused though pages are there
        serve(cache, Sequence(name, list(range(9))))
    latent, recurrent = cache.usage().groups
    assert (latent.asked_tokens, latent.found_tokens) == (16, 8)
    assert (recurrent.asked_tokens, recurrent.found_tokens) == (16, 0)
    assert (latent.unit_bytes, recurrent.unit_bytes) == (10, 20)


def test_room_that_is_held_and_not_written_is_internal_fragmentation() -> None:
    cache = make_cache(LATENT)
    sequence = Sequence("a", list(range(9)))
    cache.grow(sequence, 9)
    assert cache.usage().groups[0].unwritten_tokens == 12
    cache.commit(sequence, 9)
    assert cache.usage().groups[0].unwritten_tokens == 3
    cache.release(sequence)
    assert cache.usage().groups[0].unwritten_tokens == 0


@pytest.mark.parametrize(("others", "stranded"), [(1, 0), (2, 4)])
def test_blocks_that_no_slot_is_left_for_are_stranded(others: int, stranded: int) -> None:
    cache = make_cache(LATENT, RECURRENT)
    for name in range(others):
        cache.grow(Sequence(str(name), [name] * 8), 8)
    assert [group.stranded for group in cache.usage().groups] == [stranded, 0]
