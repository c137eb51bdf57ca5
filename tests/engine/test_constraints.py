"""Grammars in a real engine: a model of random weights says only what its grammar allows."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from byte_vocabulary import END_ID, to_bytes, write_byte_tokenizer
from firstlight.engine.constraints import Constraints, open_factory
from firstlight.engine.messages import Cancel, Drain, Submit
from firstlight.errors import RequestError
from firstlight.inputs.grammar import GrammarRequest, to_grammar
from firstlight.schedule.request import FinishReason, SamplingParams, SubmittedRequest
from firstlight.schedule.step import NO_TOKEN_LEFT, TokenMask
from local_engine import EngineShape, LocalEngine
from scripted_loop import serve_script
from tiny_models import tiny_config, write_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["round", "square"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
SQUEEZED = EngineShape(num_blocks=48, block_size=4, max_batch_tokens=32, chunk_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, tiny_config("llama3"))
    write_byte_tokenizer(path)
    return path


def held(name: str, grammar: str, **params: Any) -> SubmittedRequest:
    given = {"max_tokens": 200, "temperature": 1.0, "end_token_ids": (END_ID,), **params}
    return SubmittedRequest(
        request_id=name,
        prompt_ids=[5, 6, 7] * 5,
        params=SamplingParams(grammar=grammar, **given),
    )


@pytest.fixture(scope="module")
def grammar() -> str:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    return to_grammar(GrammarRequest(response_format=form))


def check_thing(text: bytes) -> None:
    thing = json.loads(text)
    assert list(thing) == ["name", "size", "kind"] and thing["kind"] in ("round", "square")
    assert len(thing["name"]) <= 12 and 0 <= thing["size"] <= 99


def test_random_weights_answer_in_json_of_the_schema(folder: Path, grammar: str) -> None:
    requests = [held(f"r{seed}", grammar, seed=seed) for seed in range(4)]
    requests.append(held("greedy", grammar, temperature=0.0))
    outside, _, flat = serve_script(folder, (0, Submit(requests)), (1, Drain()))
    for request in requests:
        assert outside.last(request.request_id).finish is FinishReason.STOP
        check_thing(to_bytes(outside.tokens(request.request_id)))
    assert len({tuple(outside.tokens(r.request_id)) for r in requests}) > 1
    assert flat["running_requests"] == 0 and flat.get("nan_rows_total", 0) == 0


def test_a_preempted_request_goes_on_in_its_grammar(folder: Path, grammar: str) -> None:
    requests = [held(f"r{seed}", grammar, seed=seed) for seed in range(5)]
    calm, _, _ = serve_script(folder, (0, Submit(requests)), (1, Drain()))
    squeezed, engine, _ = serve_script(folder, (0, Submit(requests)), (1, Drain()), shape=SQUEEZED)
    assert engine.scheduler.counts.preemptions > 0
    for request in requests:
        check_thing(to_bytes(squeezed.tokens(request.request_id)))
        assert squeezed.tokens(request.request_id) == calm.tokens(request.request_id)


def test_a_neighbour_without_a_grammar_is_not_held(folder: Path, grammar: str) -> None:
    free = held("free", "", temperature=0.0, max_tokens=12)
    alone, _, _ = serve_script(folder, (0, Submit([free])), (1, Drain()))
    outside, _, _ = serve_script(folder, (0, Submit([held("a", grammar), free])), (1, Drain()))
    assert outside.tokens("free") == alone.tokens("free")
    check_thing(to_bytes(outside.tokens("a")))


@pytest.mark.parametrize("text", ["start: /(/", "nonsense", 'start: "a" missing'])
def test_a_grammar_that_is_none_is_refused_and_harms_nobody(
    folder: Path, grammar: str, text: str
) -> None:
    outside, engine, _ = serve_script(
        folder, (0, Submit([held("bad", text), held("good", grammar)])), (1, Drain())
    )
    assert outside.last("bad").refusal == "bad_grammar" and outside.tokens("bad") == []
    assert outside.last("bad").error and engine.scheduler.counts.received == 1
    check_thing(to_bytes(outside.tokens("good")))


def test_a_request_without_a_tokenizer_is_refused(tmp_path: Path, grammar: str) -> None:
    write_checkpoint(tmp_path, tiny_config("llama3"))
    outside, _, _ = serve_script(tmp_path, (0, Submit([held("a", grammar)])), (0, Drain()))
    assert outside.last("a").refusal == "no_grammar"
    assert "tokenizer" in (outside.last("a").error or "")


def test_a_cancel_ends_it_while_compiled_or_served(folder: Path, grammar: str) -> None:
    for step in (0, 5):
        outside, _, flat = serve_script(
            folder,
            (0, Submit([held("a", grammar), held("b", grammar, seed=1)])),
            (step, Cancel(["a"])),
            (step, Drain()),
        )
        assert outside.last("a").finish is FinishReason.CANCELLED
        check_thing(to_bytes(outside.tokens("b")))
        assert flat["running_requests"] == flat["waiting_requests"] == 0


def test_a_grammar_that_leaves_no_token_ends_the_request_with_the_reason(folder: Path) -> None:
    nothing = r"start: /a[^\x00-\x{10FFFF}]/"
    outside, _, flat = serve_script(folder, (0, Submit([held("a", nothing)])), (1, Drain()))
    last = outside.last("a")
    assert last.finish is FinishReason.ERROR and outside.tokens("a") == []
    assert "grammar cannot be kept to" in (last.error or "") and "\n" not in (last.error or "")
    assert flat.get("nan_rows_total", 0) == 0


def test_a_mask_without_a_token_fails_its_row_alone(folder: Path) -> None:
    engine = LocalEngine(folder)
    ids = [engine.submit([5, 6, 7], SamplingParams(max_tokens=4)) for _ in range(2)]
    plan = engine.scheduler.schedule()
    assert plan is not None
    row = plan.new[0].row
    masks = [TokenMask(row, bytes(40))]
    result = engine.runner.run(msgspec.structs.replace(plan, masks=masks))
    assert [(failed.row, failed.reason) for failed in result.failed] == [(row, NO_TOKEN_LEFT)]
    assert len(result.tokens) == 1
    updates = {update.request_id: update for update in engine.scheduler.update(result)}
    assert updates[ids[0]].error == NO_TOKEN_LEFT and updates[ids[1]].finish is None


def test_log_probabilities_are_those_without_the_grammar(folder: Path, grammar: str) -> None:
    free = held("free", "", temperature=0.0, max_tokens=1, logprobs=3)
    bound = held("bound", grammar, temperature=0.0, logprobs=3)
    outside, _, _ = serve_script(folder, (0, Submit([free, bound])), (1, Drain()))
    of_free = next(o for o in outside.outputs if o.request_id == "free").logprobs
    of_bound = next(o for o in outside.outputs if o.request_id == "bound").logprobs
    assert of_free and of_bound
    tops = zip(of_free[0].top, of_bound[0].top, strict=True)
    for (token, value), (same_token, same_value) in tops:
        assert token == same_token and value == pytest.approx(same_value, abs=1e-5)
    assert of_bound[0].token_id == 3 + ord("{") and of_bound[0].rank > 1


def test_no_more_than_a_queue_of_grammars_is_compiled(folder: Path, grammar: str) -> None:
    constraints = Constraints(lambda: open_factory(folder, 300), max_pending=2)
    constraints.prepare(held("a", grammar))
    with pytest.raises(RequestError, match="own id"):
        constraints.prepare(held("a", grammar))
    constraints.prepare(held("b", grammar))
    with pytest.raises(RequestError, match="try again") as refused:
        constraints.prepare(held("c", grammar))
    assert refused.value.code == "queue_full"
    assert constraints.withdraw(["a", "x"]) == ["a"] and constraints.num_pending == 1
