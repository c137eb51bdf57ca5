"""Groups with a window: what lies behind it is given back, and reuse needs the last window only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.block_pool import NULL_BLOCK
from firstlight.cache.paged_group import PagedGroup, most_blocks_held
from firstlight.cache.prefix_index import PrefixChain, PrefixScope
from firstlight.sharding.state_spec import GroupedQueryState

SIZE, WINDOW, CHUNK = 4, 8, 4
SCOPE = PrefixScope("model", SIZE, "")


def make_group(num_blocks: int = 12, window: int = WINDOW) -> PagedGroup:
    spec = GroupedQueryState(kv_heads=1, head_dim=4, window=window)
    return PagedGroup(spec, num_blocks=num_blocks, block_size=SIZE, chunk_tokens=CHUNK)


def chain(first: int = 0, length: int = 200) -> PrefixChain:
    return PrefixChain(SCOPE, [first, *range(1, length)])


def compute(group: PagedGroup, name: str, prefix: PrefixChain, num_blocks: int) -> None:
    """Computes and enters a prefix block by block."""
    group.start(name, prefix, 0, 1)
    group.enter(name, prefix, range(1))
    for block in range(1, num_blocks):
        group.give_back(name, block * SIZE)
        group.extend(name, 1)
        group.enter(name, prefix, range(block, block + 1))
    group.check_integrity({name: num_blocks})


def test_a_long_sequence_holds_a_window_and_a_chunk() -> None:
    group = make_group()
    compute(group, "a", chain(), 40)
    assert group.most_held == 4
    table = group.table("a")
    assert table[:36] == (NULL_BLOCK,) * 36 and NULL_BLOCK not in table[36 + 1 :]
    assert group.usage().used <= 4 and group.num_free >= 7
    group.release("a")
    assert group.num_free == group.num_usable


def test_a_prefix_is_reused_where_its_last_window_is_found() -> None:
    group, prefix = make_group(), chain()
    compute(group, "a", prefix, 20)
    group.release("a")
    assert group.reusable_tokens(prefix, 80) == 80
    assert group.reusable_tokens(prefix, 40) == 0  # evicted long ago
    assert group.cost(prefix, 20, 21) == 3  # two blocks of the window, and a new one
    table = group.start("b", prefix, 20, 21)
    assert table[:18] == [NULL_BLOCK] * 18 and len(table) == 21
    group.check_integrity({"b": 20})


def test_a_gap_in_the_window_rules_out_the_lengths_that_see_it() -> None:
    group, prefix = make_group(num_blocks=30), chain()
    compute(group, "a", prefix, 10)
    missing = group._index.find(prefix.key(7))
    assert missing is not None and group._index.discard(missing)
    assert group.reusable_tokens(prefix, 40) == 40  # of which tokens from 33 on are seen
    assert group.reusable_tokens(prefix, 39) == 28


def test_what_failed_takes_along_what_it_gave_back() -> None:
    group, prefix = make_group(num_blocks=30), chain()
    compute(group, "a", prefix, 10)
    assert group.reusable_tokens(chain(), 20) == 20
    group.discard("a")
    group.release("a")
    group.check_integrity({})
    assert group.usage().cached == 0
    assert all(group.reusable_tokens(chain(), n * SIZE) == 0 for n in range(11))


def test_a_pool_smaller_than_a_window_holds_whole_requests() -> None:
    assert make_group(num_blocks=4).most_held is None


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 9), st.integers(0, 200))
def test_the_bound_covers_every_position(window: int, chunk: int, size: int, start: int) -> None:
    first, last = max(0, start - window + 1), start + chunk - 1
    assert last // size - first // size + 1 <= most_blocks_held(window, chunk, size)


@pytest.mark.parametrize("length", range(1, 12))
def test_lengths_below_the_window_are_like_full_attention(length: int) -> None:
    full = PagedGroup(GroupedQueryState(1, 4), num_blocks=40, block_size=SIZE)
    wide = make_group(num_blocks=40, window=400)
    for group in (full, wide):
        compute(group, "a", chain(), length)
    assert full.table("a") == wide.table("a")
    for asked in range(60):
        found = [group.reusable_tokens(chain(), asked) for group in (full, wide)]
        assert found[0] == found[1]
