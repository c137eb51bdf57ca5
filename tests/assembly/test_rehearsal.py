"""Process groups and modules of ranks of which none is real."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from firstlight.assembly.rehearsal import pretended_world, rehearse_builds, rehearse_groups
from firstlight.kernels.builtin import reference_kernels
from firstlight.models.spec import ModelSpec
from firstlight.planning.rehearse import process_groups, rehearse
from firstlight.planning.weights import weight_table
from firstlight.runner.model_path import read_spec
from firstlight.sharding.layout import Layout

CHECKPOINT = Path(__file__).parents[1] / "data" / "k3" / "checkpoint"


@pytest.fixture(scope="module")
def mini() -> ModelSpec:
    return read_spec(CHECKPOINT)


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(pp=3), Layout(tp=4, pp=2)])
def test_every_rank_sums_with_those_it_should(layout: Layout) -> None:
    groups = process_groups(layout)["tp"]
    assert rehearse_groups(layout, groups) == ""
    assert not dist.is_initialized()
    wrong = [[*group[1:], layout.world_size] for group in groups]
    assert "rank 0 sums with" in rehearse_groups(layout, wrong)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=3), Layout(pp=3, dp=2, ep=2)])
def test_what_is_built_is_what_the_rules_give_each_stage(mini: ModelSpec, layout: Layout) -> None:
    loads = rehearse(mini, weight_table(mini, "bfloat16"), layout).loads
    alike = [[load.rank] for load in loads]
    built = rehearse_builds(mini, layout, alike, kernels=reference_kernels(), dtype=torch.bfloat16)
    assert [one.problem for one in built] == [""] * layout.world_size
    assert [one.num_bytes for one in built] == [load.held_bytes for load in loads]
    assert not dist.is_initialized()


def test_what_cannot_be_cut_is_a_problem_and_no_traceback(mini: ModelSpec) -> None:
    (built,) = rehearse_builds(
        mini, Layout(tp=7), [[6]], kernels=reference_kernels(), dtype=torch.bfloat16
    )
    assert "cannot be cut 7 ways" in built.problem


def test_the_world_is_gone_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), pretended_world(Layout(tp=2), 1):
        raise ZeroDivisionError
    assert not dist.is_initialized()
