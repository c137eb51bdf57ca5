import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.cache.block_pool import NULL_BLOCK, BlockPool
from firstlight.errors import OutOfBudget


def test_blocks_come_out_in_order_of_release_and_dropped_ones_first() -> None:
    pool = BlockPool(5)
    assert [pool.acquire() for _ in range(4)] == [1, 2, 3, 4]
    for block, keep in ((3, True), (1, True), (4, False), (2, True)):
        pool.release(block, keep=keep)
    assert [pool.acquire() for _ in range(4)] == [4, 3, 1, 2]


def test_a_shared_free_block_is_not_handed_out_until_its_last_holder_is_gone() -> None:
    pool = BlockPool(3)
    pool.release(pool.acquire(), keep=True)
    pool.share(1)
    pool.share(1)
    assert pool.acquire() == 2 and pool.num_free == 0
    pool.release(1, keep=True)
    assert pool.num_free == 0
    pool.release(1, keep=True)
    assert pool.acquire() == 1


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.release(1, keep=True)
    assert pool.acquire() == 1
    with pytest.raises(AssertionError):
        pool.acquire()
    with pytest.raises(OutOfBudget, match="at least 2"):
        BlockPool(1)


@settings(deadline=None)
@given(
    st.integers(2, 12), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.booleans()))
)
def test_any_use_keeps_the_counts(num_blocks: int, actions: list[tuple[int, int, bool]]) -> None:
    pool, held = BlockPool(num_blocks), []
    for action, choice, keep in actions:
        if action == 0 and pool.num_free:
            held.append(pool.acquire())
            assert held.count(held[-1]) == 1
        elif action == 1:
            held.append(1 + choice % (num_blocks - 1))
            pool.share(held[-1])
        elif action == 2 and held:
            pool.release(held.pop(choice % len(held)), keep=keep)
        pool.check_integrity()
        assert [pool.references(b) for b in range(num_blocks)] == list(
            map(held.count, range(num_blocks))
        )
    assert NULL_BLOCK not in held


@pytest.mark.parametrize("damage", ["lost", "counted", "reference"])
def test_check_integrity_finds_damage(damage: str) -> None:
    pool = BlockPool(4)
    pool.check_integrity()
    if damage == "lost":
        pool._next[1], pool._previous[3] = 3, 1
    elif damage == "counted":
        pool.num_free -= 1
    else:
        pool._references[2] = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()
