"""A service started from a plan: its values hold, and what it took is compared with the plan."""

import json
from pathlib import Path

import pytest

from firstlight.cli.main import main
from firstlight.planning.audit import read_history

LOAD = ("--context", "256", "--concurrency", "2", "--chunk-tokens", "64", "--reserve-share", "0")
RULES = ("--dtype", "float32", "--max-batch-tokens", "128")
COMPARED = {"weights", "kv", "framework", "activations", "resident"}


@pytest.mark.slow
def test_a_start_from_a_plan_is_audited(tiny_store: Path, tmp_path: Path, start_service) -> None:
    plan = tmp_path / "plan.json"
    asked = ("plan", str(tiny_store), "--devices", "1xB300", "--tp", "1", *LOAD, *RULES)
    assert main([*asked, "--plan-path", str(plan)]) == 0
    ranks = json.loads(plan.read_text())["ranks"]
    memory = sum(ranks[0]["components"].values())
    # Where both are given the flag of the service's fixture wins over the plan's budget.
    kv = ranks[0]["components"]["kv"]
    service = start_service(
        tiny_store, "--plan", str(plan), "--memory-bytes", str(memory), "--kv-budget-bytes", str(kv)
    ).wait_ready()
    facts = service.get("/startup").json()["facts"]
    assert facts["kv_bytes_per_rank"] == kv
    lines = facts["memory_audit"].splitlines()
    assert {line.removeprefix("off: ").split("/")[0] for line in lines} >= COMPARED
    metrics = service.metrics()
    for name in ("weights", "kv"):
        label = f'{{component="{name}/0"}}'
        assert metrics[f"memory_predicted_bytes{label}"] == metrics[f"memory_actual_bytes{label}"]
    assert metrics['memory_actual_bytes{component="activations/0"}'] > 0
    newest = read_history(tiny_store / "audit" / "starts.jsonl")[-1]
    assert newest.errors["weights/0"] == newest.errors["kv/0"] == 0.0
