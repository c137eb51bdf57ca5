"""A service whose weights do not fit: the answers of one whose weights do, as planned, measured."""

from pathlib import Path
from typing import Any

from firstlight.planning.weights import held_bytes
from firstlight.planning.work import model_work
from firstlight.runner.model_path import read_spec
from firstlight.sharding.layout import Layout
from firstlight.sharding.residency import least_budget, rank_weights

PROMPT = [5, 6, 7, 8]


def test_two_ranks_within_half_their_weights(
    tiny_store: Path, start_service: Any, shared_service: Any
) -> None:
    spec, layout = read_spec(tiny_store), Layout(tp=2)
    budget = least_budget(rank_weights(spec.family.table, spec.facts, layout, 4))
    service = start_service(tiny_store, "--tp", "2", "--weights-budget", str(budget)).wait_ready()
    facts = service.get("/startup").json()["facts"]
    assert facts["known_answers"].startswith("known answers hold")
    want = shared_service.complete(PROMPT, max_tokens=24).json()["choices"][0]["token_ids"]
    found = service.complete(PROMPT, max_tokens=24).json()["choices"][0]["token_ids"]
    assert found == want
    metrics = service.metrics()
    planned = held_bytes(spec, model_work(spec, "float32").table, layout, 0, budget)
    for rank in "01":
        label = f'{{component="weights/{rank}"}}'
        measured = metrics[f"memory_actual_bytes{label}"]
        assert measured == metrics[f"memory_predicted_bytes{label}"] == sum(planned.values())
        assert measured <= budget
        assert metrics[f'weights_streamed_bytes_total{{rank="{rank}",source="file"}}'] > 0
