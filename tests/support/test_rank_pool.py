"""The pool of gloo ranks that other tests stand on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from firstlight.errors import LayoutError
from rank_pool import RankPool


def summed(values):
    total = torch.tensor([float(values[dist.get_rank()])])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def refuse_on(rank):
    if dist.get_rank() == rank:
        raise LayoutError(f"rank {rank} refuses")
    dist.barrier()


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


@pytest.fixture(scope="module")
def pair():
    """A pool of two for the tests that end it: the others' four take longer to start again."""
    pool = RankPool(2)
    yield pool.group
    pool.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_collectives_span_exactly_the_group(ranks, num_ranks):
    results = ranks(num_ranks).run(summed, [1, 2, 4, 8])
    total = sum([1, 2, 4, 8][:num_ranks])
    assert results == [(rank, num_ranks, total) for rank in range(num_ranks)]


def test_one_group_runs_many_functions_in_the_same_processes(ranks):
    group = ranks(2)
    first, second = group.run(os.getpid), group.run(os.getpid)
    assert first == second and len(set(first)) == 2


@pytest.mark.slow
def test_an_exception_comes_back_with_its_rank_and_type(pair):
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*refuse_on") as caught:
        pair(2).run(refuse_on, 1)
    assert isinstance(caught.value.__cause__, LayoutError)
    assert pair(2).run(summed, [1, 1])[0][2] == 2


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed_and_its_stack_shown(pair):
    with pytest.raises(RuntimeError, match=r"no answer from ranks \[1\](.|\n)*in sleep_on"):
        pair(2).run(sleep_on, 1, timeout_seconds=1)
    assert pair(2).run(summed, [1, 2])[1] == (1, 2, 3)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_status(pair):
    with pytest.raises(RuntimeError, match="rank 0 failed\nthe process ended with status 7"):
        pair(2).run(die_on, 0)
    assert pair(1).run(summed, [5]) == [(0, 1, 5)]


def test_a_local_function_is_refused(pair):
    with pytest.raises(AssertionError, match="module-level"):
        pair(1).run(lambda: None)
