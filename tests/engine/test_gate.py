"""The start-up gate: what it lets pass, and each kind of wrong answer it must not."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.accept.convert import convert
from firstlight.checkpoint.known_answers import KnownAnswers, KnownCase, read_answers
from firstlight.engine.gate import LEAST_TOLERANCE, compare_answers, fit_answers, tolerance_for
from firstlight.schedule.step import TokenLogprobs
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy
from tiny_text_model import write_text_model

CASE = KnownCase(
    name="prose",
    token_ids=[1, 2, 3, 4],
    top1=[2, 9, 4],
    margins=[1.0, 0.5, 1e-6],
    logprobs=[-0.1, -2.0, -0.7],
)
ANSWERS = KnownAnswers(1, "test", {"float32": 1e-5, "bfloat16": 0.01}, [CASE])


def score(index: int, *, logprob: float | None = None, top: int | None = None) -> TokenLogprobs:
    value = CASE.logprobs[index] if logprob is None else logprob
    best = CASE.top1[index] if top is None else top
    return TokenLogprobs(CASE.token_ids[index + 1], value, 1, [(best, value)])


def judged(*scores: TokenLogprobs, dtype: str = "float32") -> Any:
    return compare_answers(ANSWERS, [list(scores)], dtype)


def test_equal_answers_pass_and_are_counted() -> None:
    result = judged(score(0), score(1), score(2))
    assert result.passed and result.failures == () and result.worst_logprob_error == 0
    assert (result.compared, result.positions) == (2, 3)  # the third has no margin to speak of
    assert "2 of 3 positions compared" in result.summary and " hold" in result.summary


def test_a_wrong_log_probability_fails() -> None:
    result = judged(score(0), score(1, logprob=-2.0001), score(2))
    assert not result.passed and len(result.failures) == 1
    assert "prose, position 2" in result.failures[0] and "-2.0001" in result.failures[0]
    assert result.worst_logprob_error == pytest.approx(1e-4) and "DO NOT HOLD" in result.summary


def test_a_difference_within_the_tolerance_passes() -> None:
    assert judged(score(0, logprob=-0.1 + 0.9 * LEAST_TOLERANCE * 2), score(1), score(2)).passed


def test_a_wrong_best_token_fails_where_the_margin_is_large() -> None:
    result = judged(score(0, top=7), score(1), score(2))
    assert result.failures == ("prose, position 1: most likely token 7, recorded 2",)


def test_another_best_token_passes_where_the_two_are_equal() -> None:
    assert judged(score(0), score(1), score(2, top=7)).passed


def test_no_best_token_fails() -> None:
    bare = TokenLogprobs(2, -0.1, 1, [])
    assert not judged(bare, score(1), score(2)).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_fails(value: float) -> None:
    result = judged(score(0), score(1, logprob=value), score(2))
    assert not result.passed and result.worst_logprob_error == math.inf


def test_a_missing_score_fails() -> None:
    result = judged(score(0), score(1))
    assert result.failures == ("prose: 2 scores for 3 positions",) and not result.passed


def test_a_missing_case_is_no_pass() -> None:
    with pytest.raises(ValueError):
        compare_answers(ANSWERS, [], "float32")


def test_the_tolerance_follows_the_spread_of_the_dtype() -> None:
    assert tolerance_for(ANSWERS, "bfloat16") == pytest.approx(0.04)
    assert tolerance_for(ANSWERS, "float32") == pytest.approx(4e-5)
    assert tolerance_for(msgspec.structs.replace(ANSWERS, spread={}), "float32") == LEAST_TOLERANCE


def test_cases_longer_than_the_context_are_cut_not_left_out() -> None:
    cut = fit_answers(ANSWERS, context_length=4)
    assert [case.token_ids for case in cut.cases] == [[1, 2, 3]]
    assert (cut.cases[0].top1, cut.cases[0].margins) == ([2, 9], [1.0, 0.5])
    assert cut.cases[0].logprobs == [-0.1, -2.0] and cut.spread == ANSWERS.spread
    assert fit_answers(ANSWERS, context_length=5) == ANSWERS
    assert not compare_answers(cut, [[score(0), score(1, logprob=-3.0)]], "float32").passed


def test_a_context_in_which_nothing_can_be_compared_leaves_no_case() -> None:
    assert fit_answers(ANSWERS, context_length=2).cases == []


def test_a_gate_that_compared_nothing_does_not_pass() -> None:
    nothing = msgspec.structs.replace(ANSWERS, cases=[])
    assert not compare_answers(nothing, [], "float32").passed


def test_int8_caches_pass_by_their_own_tolerance_alone(tmp_path: Path) -> None:
    convert(write_text_model(tmp_path / "checkpoint"), tmp_path / "store")
    answers = read_answers(tmp_path / "store")
    assert answers is not None
    engine = LocalEngine(tmp_path / "store", EngineShape(kv_dtype="int8"), fast_kernels())
    texts = [case.token_ids for case in answers.cases]
    scores = [o.prompt_logprobs for o in engine.run(texts, greedy(1, prompt_logprobs=1))]
    found = compare_answers(answers, scores, "float32", "int8")
    assert found.passed and found.compared > 0, found.shown_failures
    assert not compare_answers(answers, scores, "float32").passed
