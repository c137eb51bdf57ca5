"""The engine's loop over a real scheduler and a real runner: messages that come between steps."""

from pathlib import Path

import pytest

from firstlight.engine.messages import Cancel, Drain, Submit
from firstlight.engine.ranks import RankFailure
from firstlight.schedule.request import FinishReason, SubmittedRequest
from local_engine import EngineShape, LocalEngine, greedy
from scripted_loop import serve_script as serve
from tiny_models import tiny_config, write_checkpoint

PROMPTS = {"a": [5, 6, 7], "b": list(range(10, 50)), "c": [9] * 20}
SQUEEZED = EngineShape(num_blocks=34, block_size=4, max_batch_tokens=16, chunk_tokens=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, tiny_config("llama3"))
    return path


def request(name: str, max_tokens: int = 12, prompt: list[int] | None = None) -> SubmittedRequest:
    return SubmittedRequest(
        request_id=name, prompt_ids=prompt or PROMPTS[name], params=greedy(max_tokens)
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[int]]:
    engine = LocalEngine(folder)
    return {n: engine.run([p], greedy(12))[0].token_ids for n, p in PROMPTS.items()}


def test_requests_that_come_between_steps_get_what_they_get_alone(
    folder: Path, alone: dict[str, list[int]]
) -> None:
    outside, _, flat = serve(
        folder,
        (0, Submit([request("a")])),
        (3, Submit([request("b"), request("c")])),
        (5, Drain()),
    )
    for name, want in alone.items():
        assert outside.tokens(name) == want
        assert outside.last(name).finish is FinishReason.LENGTH
    assert flat["waiting_requests"] == flat["running_requests"] == 0
    assert flat["cache_used_bytes/kv"] == 0


def test_a_cancel_between_steps_ends_one_and_leaves_the_others(
    folder: Path, alone: dict[str, list[int]]
) -> None:
    outside, _, flat = serve(
        folder,
        (0, Submit([request("a", max_tokens=400), request("b")])),
        (4, Cancel(["a", "unknown"])),
        (4, Drain()),
    )
    assert outside.last("a").finish is FinishReason.CANCELLED
    assert outside.tokens("a") == alone["a"][: len(outside.tokens("a"))]
    assert 0 < len(outside.tokens("a")) <= 4 and outside.tokens("b") == alone["b"]
    assert flat["running_requests"] == 0


def test_the_gauges_are_true_when_a_cancel_is_the_last_event(folder: Path) -> None:
    _, _, flat = serve(
        folder, (0, Submit([request("a", max_tokens=400)])), (4, Cancel(["a"])), (5, Drain())
    )
    assert flat["running_requests"] == flat["waiting_requests"] == 0
    assert flat["cache_used_bytes/kv"] == 0 and flat["cache_total_bytes/kv"] == 1000


def test_a_drain_finishes_what_runs_and_refuses_what_comes(
    folder: Path, alone: dict[str, list[int]]
) -> None:
    outside, _, _ = serve(
        folder, (0, Submit([request("a")])), (2, Drain()), (3, Submit([request("b")]))
    )
    assert outside.tokens("a") == alone["a"]
    assert outside.last("b").refusal == "draining" and outside.tokens("b") == []


def test_an_idle_engine_that_is_drained_ends_without_a_step(folder: Path) -> None:
    outside, engine, flat = serve(folder, (0, Drain()))
    assert outside.outputs == [] and engine.scheduler.counts.received == 0
    assert flat["running_requests"] == 0


def test_a_refused_request_harms_no_neighbour(folder: Path, alone: dict[str, list[int]]) -> None:
    too_long = request("c", prompt=[5] * 600)
    outside, _, _ = serve(folder, (0, Submit([request("a"), too_long])), (1, Drain()))
    refusal = outside.last("c")
    assert refusal.refusal and refusal.refusal != "draining" and "512" in (refusal.error or "")
    assert outside.tokens("a") == alone["a"]


def test_a_row_that_is_not_finite_is_counted_and_told(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][299] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    bad = request("c", prompt=[5, 299, 6])
    outside, _, flat = serve(tmp_path, (0, Submit([request("a"), bad])), (1, Drain()))
    assert outside.last("c").finish is FinishReason.ERROR
    assert "not finite" in (outside.last("c").error or "") and outside.tokens("c") == []
    assert len(outside.tokens("a")) == 12 and flat["nan_rows_total"] == 1


def test_queue_time_is_counted_once_a_request_whatever_its_fate(folder: Path) -> None:
    several = [
        request(f"r{i}", max_tokens=1 if i == 0 else 40, prompt=[i + 3] * 30) for i in range(6)
    ]
    _, engine, flat = serve(folder, (0, Submit(several)), (1, Drain()), shape=SQUEEZED)
    assert engine.scheduler.counts.preemptions > 0
    assert flat["preemptions_total"] == engine.scheduler.counts.preemptions
    assert flat["queue_seconds.count"] == 6


@pytest.mark.parametrize("dies_after", [0, 3])
def test_a_rank_that_is_gone_ends_the_loop_busy_or_idle(folder: Path, dies_after: int) -> None:
    messages = [(0, Submit([request("a")]))] if dies_after else []
    with pytest.raises(RankFailure, match="killed by signal 9"):
        serve(folder, *messages, dies_after=dies_after)
