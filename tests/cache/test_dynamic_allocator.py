"""Blocks in a row: where extents lie and grow, when they move, and what a hit copies."""

from typing import Any

import pytest

from cached_sequence import Sequence
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.manager import CacheManager
from firstlight.cache.moves import UnitMove
from firstlight.cache.prefix_index import PrefixChain, PrefixScope
from firstlight.sharding.state_spec import GroupedQueryState, LatentState

WINDOW = GroupedQueryState(1, 4, window=8)


def make_cache(num_blocks: int, *specs: Any) -> CacheManager:
    return CacheManager(
        specs or (LatentState(8),),
        num_blocks=num_blocks,
        block_size=4,
        model_digest="model",
        options=CacheOptions(chunk_tokens=8, allocator="dynamic"),
    )


def serve(cache: CacheManager, sequence: Sequence, num_tokens: int | None = None) -> list[int]:
    """Computes a sequence up to `num_tokens`; returns its blocks in the first group."""
    num_tokens = num_tokens or len(sequence.token_ids)
    if not sequence.num_computed:
        sequence.num_computed = cache.lookup(sequence)
    assert cache.grow(sequence, num_tokens) is not None
    cache.commit(sequence, num_tokens)
    sequence.num_computed = num_tokens
    cache.check_integrity()
    return cache.blocks(sequence)[0]


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def copies(cache: CacheManager) -> list[UnitMove]:
    return cache.tiers.moves.take_copies()


def test_an_extent_grows_in_place_while_others_leave_it_room() -> None:
    cache = make_cache(40)
    first, second = Sequence("a", tokens(9)), Sequence("b", tokens(9, 100))
    assert serve(cache, first, 4) == [1]
    start = serve(cache, second, 4)[0]
    assert start >= 5, "room for its prompt and a part of an answer"
    assert serve(cache, first) == [1, 2, 3] and not copies(cache)


def test_an_extent_without_room_moves_and_takes_its_content_along() -> None:
    cache = make_cache(9)
    first, second = Sequence("a", tokens(8)), Sequence("b", tokens(8, 100))
    serve(cache, first), serve(cache, second)
    second_at = cache.blocks(second)[0]
    first.token_ids += tokens(20, 50)
    grown = serve(cache, first, 24)
    assert grown == list(range(grown[0], grown[0] + 6))
    moved = copies(cache)
    assert moved and cache.usage().groups[0].copied == len(moved)
    renumbered = cache.tiers.moves.take_renumbered(
        "b" if second_at != cache.blocks(second)[0] else "a"
    )
    assert renumbered and all(group == 0 for group, _, _ in renumbered)
    cache.release(first), cache.release(second)
    assert cache.lookup(Sequence("c", [*tokens(8, 100), 1])) == 8, "content is found where it went"


def test_what_does_not_pay_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstlight.cache.dynamic_allocator.COPIES_PER_BLOCK", 0)
    cache = make_cache(9)
    first, second = Sequence("a", tokens(8)), Sequence("b", tokens(8, 100))
    serve(cache, first), serve(cache, second)
    first.token_ids += tokens(20, 50)
    assert cache.grow(first, 24) is None and not copies(cache)
    newcomer = Sequence("c", tokens(16, 200))
    assert not cache.can_place(newcomer, 16, num_cached=0) and cache.grow(newcomer, 16) is None
    cache.release(second)
    assert cache.grow(first, 24) is not None, "alone it may take every block"
    cache.check_integrity()


def test_a_conversation_goes_on_where_it_lies() -> None:
    cache = make_cache(20)
    first = Sequence("a", tokens(10))
    lay = serve(cache, first)
    cache.release(first)
    assert serve(cache, Sequence("b", tokens(15))) == [*lay[:2], *range(lay[2], lay[2] + 2)]
    assert not copies(cache)


def test_a_prefix_that_others_need_is_copied_and_stays_findable() -> None:
    cache = make_cache(30)
    first = Sequence("a", tokens(12))
    lay = serve(cache, first)
    sharer = Sequence("b", tokens(8) + [99] * 5)
    own = serve(cache, sharer)
    assert not set(own) & set(lay), "no block is in two tables"
    assert copies(cache) == [(0, lay[0], own[0]), (0, lay[1], own[1])]
    cache.release(first)
    third = Sequence("c", tokens(8) + [98] * 5)
    assert cache.lookup(third) == 8 and not set(serve(cache, third)) & set(lay[:3])
    assert cache.lookup(Sequence("d", tokens(13))) == 12, "what continues it is still there"


def test_what_fails_takes_the_original_along() -> None:
    cache = make_cache(30)
    first, sharer = Sequence("a", tokens(12)), Sequence("b", tokens(8) + [99] * 5)
    serve(cache, first), serve(cache, sharer)
    cache.discard(sharer)
    cache.check_integrity()
    assert cache.lookup(Sequence("c", tokens(13))) == 0


def test_a_copy_is_found_when_the_original_is_gone() -> None:
    cache = make_cache(12)
    first, sharer = Sequence("a", tokens(8)), Sequence("b", tokens(8) + [99] * 2)
    serve(cache, first), serve(cache, sharer)
    cache.release(first)
    serve(cache, taker := Sequence("c", tokens(30, 200)))
    cache.release(taker), cache.release(sharer)
    cache.check_integrity()
    assert cache.lookup(Sequence("d", tokens(9))) == 8


def test_groups_with_a_window_stay_as_they_are() -> None:
    cache = make_cache(12, LatentState(8), WINDOW)
    sequence = Sequence("a", tokens(40))
    for end in range(8, 41, 8):
        serve(cache, sequence, end)
    latent, window = cache.blocks(sequence)
    assert latent == list(range(latent[0], latent[0] + 10)) and window[:5] == [0] * 5
    assert cache.usage().groups[0].longest_run == 1


def test_integrity_finds_a_row_that_is_none() -> None:
    cache = make_cache(12)
    sequence = Sequence("a", tokens(12))
    serve(cache, sequence)
    group: Any = cache._groups[0]
    blocks = group._tables["a"].blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]
    with pytest.raises(AssertionError, match="does not lie in a row"):
        cache.check_integrity()


def test_a_long_prefix_in_pieces_is_reused_as_far_as_it_can_be_copied() -> None:
    """Alone in the cache nothing may be asked for that never fits."""
    cache = make_cache(11)
    chain = PrefixChain(PrefixScope("model", 4, ""), tokens(32))
    group: Any = cache._groups[0]
    for index, block in enumerate((9, 2, 5, 3, 8, 1, 6, 4)):
        group._stock.take_at(block)
        group._index.enter(chain.key(index), block)
        group._stock.release(block)
    sequence = Sequence("a", tokens(36))
    assert cache.lookup(sequence) == 20, "five and their five originals"
    assert len(serve(cache, sequence)) == 9
