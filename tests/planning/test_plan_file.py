import json

import pytest

from firstlight.errors import BadInput
from firstlight.planning.audit import append_history, compare, read_history, record
from firstlight.planning.hardware import parse_fleet
from firstlight.planning.plan_file import plan_of, read_plan, write_plan
from firstlight.planning.search import Question, evaluate
from firstlight.planning.workload import Workload
from firstlight.sharding.layout import Layout


@pytest.fixture(scope="module")
def plan(k3):
    load = Workload(context=131072, concurrency=16)
    answer = evaluate(Question(k3, parse_fleet("64xS5000@8"), load), Layout(tp=8, pp=8))
    return plan_of(answer, "models/K3", 1)


def test_a_plan_survives_its_file(plan, tmp_path):
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_components_are_found_by_the_engines_names(plan):
    assert plan.predicted_bytes("weights/63") == plan.ranks[7].components["weights"]
    assert plan.kv_budget_bytes == max(rank.components["kv"] for rank in plan.ranks)
    for name in ("weights/64", "weights/-1", "weights", "luck/0"):
        with pytest.raises(BadInput, match="no component"):
            plan.predicted_bytes(name)


@pytest.mark.parametrize(
    ("change", "part"),
    [({"version": 2}, "plan of version 2"), ({"tp": "x"}, "no plan"), ({"new": 1}, "no plan")],
)
def test_what_is_no_plan_of_this_version_is_refused(plan, tmp_path, change, part):
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadInput, match=part):
        read_plan(path)


def test_an_audit_names_what_is_off_by_more_than_three_percent(plan):
    weights, caches = plan.predicted_bytes("weights/0"), plan.predicted_bytes("kv/0")
    measured = {"weights/0": weights, "kv/0": int(caches * 1.04), "graphs/0": 5}
    found = compare(plan, measured)
    assert [one.component for one in found if one.is_off] == ["graphs/0", "kv/0"]
    assert found[1].text.endswith("measured, -3.8%")
    assert found[0].text == "graphs/0: 5 B measured, not in the plan"
    assert found[2].error == 0.0


def test_the_history_grows_by_a_line_a_start(plan, tmp_path):
    path = tmp_path / "audit.jsonl"
    assert read_history(path) == ()
    entries = [record(plan, compare(plan, {"kv/0": size}), at=1.5) for size in (1, 10**9)]
    for entry in entries:
        append_history(path, entry)
    assert list(read_history(path)) == entries
    path.write_text("[]\n")
    with pytest.raises(BadInput, match="line 1"):
        read_history(path)
