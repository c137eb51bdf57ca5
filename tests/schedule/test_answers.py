import pytest

from firstlight.schedule.answers import Answers
from firstlight.schedule.request import Request, SamplingParams, SubmittedRequest
from firstlight.schedule.step import PromptLogprobs, StepResult, TokenLogprobs


def make_request() -> Request:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    submitted = SubmittedRequest(request_id="r", prompt_ids=list(range(9)), params=params)
    return Request(submitted, arrival=0)


def take(request: Request, first: int, end: int) -> list[tuple[int, int]]:
    """Hands over the positions [first, end) and returns what was new of them."""
    scores = [TokenLogprobs(position, -1.0, 0, []) for position in range(first, end)]
    result = StepResult(1, [], [PromptLogprobs(0, first, scores)], [], 0.0)
    part = Answers(result).take_scores(request, 0)
    if part is None:
        return []
    return [(part.first + i, score.token_id) for i, score in enumerate(part.tokens)]


def test_scores_computed_again_are_handed_on_once() -> None:
    request = make_request()
    assert take(request, 1, 4) == [(1, 1), (2, 2), (3, 3)]
    assert take(request, 1, 3) == [] and take(request, 3, 4) == []
    assert take(request, 2, 6) == [(4, 4), (5, 5)]
    assert take(request, 6, 9) == [(6, 6), (7, 7), (8, 8)]


def test_a_gap_in_the_scores_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="lacks"):
        take(make_request(), 2, 4)
