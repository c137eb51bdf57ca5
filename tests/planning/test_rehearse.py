import json
from pathlib import Path

import pytest

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.hardware import parse_fleet
from firstlight.planning.memory import plan_memory
from firstlight.planning.rehearse import SourceNames, process_groups, rehearse
from firstlight.planning.weights import weight_table
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout

INDEX = Path(__file__).parent.parent / "data" / "k3" / "checkpoint" / "model.safetensors.index.json"


def failed(rehearsal):
    return [one.name for one in rehearsal.failures]


@pytest.mark.parametrize(
    "layout", [Layout(tp=8, pp=8), Layout(tp=2, pp=8, dp=4, ep=8), Layout(tp=8, dp=128, ep=128)]
)
def test_all_ranks_of_the_real_model_can_be_gone_through(k3, k3_work, layout):
    fleet = parse_fleet(f"{layout.world_size}xS5000@8")
    load = Workload(context=131072, concurrency=16)
    memory = plan_memory(k3_work, Arrangement(layout), fleet, load, PlanRules())
    rehearsal = rehearse(k3, k3_work.table, layout, memory=memory)
    assert len(rehearsal.loads) == layout.world_size
    assert failed(rehearsal) == ([] if memory.fits else ["memory"])
    assert all(0 < load.read_bytes <= load.held_bytes for load in rehearsal.loads)


def test_expert_tensors_are_dealt_out_and_not_read_twice(k3, k3_work):
    loads = rehearse(k3, k3_work.table, Layout(tp=8, ep=8)).loads
    assert {load.num_tensors for load in loads} == {497_220 - 92 * 896 * 6 * 7 // 8}


def test_the_index_of_a_checkpoint_is_compared_name_by_name(mini):
    index = json.loads(INDEX.read_text())
    table = weight_table(mini, "bfloat16")
    names = dict(index["weight_map"])
    total = index["metadata"]["total_size"]
    assert failed(rehearse(mini, table, Layout(), SourceNames(names, total))) == []
    names["stray.weight"] = names.pop("language_model.model.norm.weight")
    broken = rehearse(mini, table, Layout(), SourceNames(names, total + 1))
    assert failed(broken) == ["no tensor is missing", "no tensor is unexpected", "bytes agree"]
    assert broken.failures[0].detail == "language_model.model.norm.weight"


def test_a_layout_that_cannot_be_is_one_failure(k3, k3_work):
    rehearsal = rehearse(k3, k3_work.table, Layout(tp=5))
    assert rehearsal.loads == () and failed(rehearsal) == ["layout"]
    assert "tp 5 does not divide" in rehearsal.failures[0].detail


def test_memory_that_is_short_is_told_as_the_plan_tells_it(k3, k3_work):
    load = Workload(context=131072, concurrency=16)
    at = Arrangement(Layout(tp=8))
    memory = plan_memory(k3_work, at, parse_fleet("8xS5000"), load, PlanRules())
    rehearsal = rehearse(k3, k3_work.table, at.layout, memory=memory)
    assert rehearsal.failures[0].detail.startswith("short by 191 GiB on rank 0: weights 192 GiB")


def test_groups_hold_each_rank_once():
    groups = process_groups(Layout(tp=2, pp=2, dp=2, ep=4))
    assert groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["dp"][0] == [0, 2] and groups["pp"][0] == [0, 4]
    assert groups["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
