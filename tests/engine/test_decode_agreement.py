"""The gate's second half: tokens decoded one by one against the same tokens read at once."""

import math

import pytest

from firstlight.checkpoint.known_answers import KnownCase
from firstlight.engine.gate import GateResult
from firstlight.engine.self_test import DECODE_TOKENS, decoding_request, scoring_request
from firstlight.schedule.step import TokenLogprobs

PASSED = GateResult(True, 3, 3, 0.0, 1e-3, ())


def tokens(*logprobs):
    return [TokenLogprobs(7, value, 1, []) for value in logprobs]


def case(num_tokens):
    return KnownCase("text", list(range(num_tokens)), [], [], [])


def test_equal_decoding_passes_and_is_counted():
    result = PASSED.with_decoding([tokens(-1.0, -2.0)], [tokens(-9.0, -1.0, -2.0005)])
    assert result.passed and result.decoded == 2 and "2 decode steps" in result.summary


@pytest.mark.parametrize("wrong", [-1.5, math.nan])
def test_a_decode_step_that_says_otherwise_fails(wrong):
    result = PASSED.with_decoding([tokens(-1.0, wrong)], [tokens(-1.0, -2.0)])
    assert not result.passed and "read at once" in result.shown_failures


def test_no_decoding_at_all_fails():
    assert not PASSED.with_decoding([[]], [tokens(-1.0)]).passed


def test_an_earlier_failure_stays():
    failed = GateResult(False, 0, 0, 0.0, 1e-3, ("first",))
    assert failed.with_decoding([tokens(-1.0)], [tokens(-1.0)]).failures == ("first",)


@pytest.mark.parametrize("num_tokens", [2, 3, 5, 13, 48])
def test_decoding_never_outgrows_the_text(num_tokens):
    request = decoding_request(case(num_tokens))
    length = len(request.prompt_ids) + request.params.max_tokens
    assert request.params.max_tokens >= 1 and length <= num_tokens
    assert num_tokens < 48 or request.params.max_tokens == DECODE_TOKENS


def test_scoring_asks_for_every_token():
    request = scoring_request("name", [1, 2, 3])
    assert request.params.prompt_logprobs == 1 and not request.params.logprobs
