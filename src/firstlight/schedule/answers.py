"""Owns what a step brought for each request: the ranks' answers by row, and the record handed on.

Knows neither blocks nor policy.
"""

import msgspec

from firstlight.schedule.request import FinishReason, Request
from firstlight.schedule.step import PromptLogprobs, SampledToken, StepResult, TokenLogprobs


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What became known of one request since its last update; `finish` is set in its last one.

    `logprobs` are those of `token_ids` where the request wants them. `prompt_logprobs` continue
    those already given without gap or repetition. `error` says why, when `finish` is `error`.
    `num_cached` counts the prompt tokens that were found in the cache when the request started.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0


def last_update(request: Request, finish: FinishReason, error: str | None = None) -> RequestUpdate:
    """Returns the last that is told of a request."""
    return RequestUpdate(
        request_id=request.request_id, finish=finish, error=error, num_cached=request.num_cached
    )


def find_finish(
    request: Request, token: SampledToken | None, most_tokens: int
) -> FinishReason | None:
    """Ends by the request's own rules, at the context's end, or when no output is wanted."""
    if token is None:
        return FinishReason.LENGTH if request.num_pending == 0 else None
    is_full = len(request.token_ids) >= most_tokens
    return request.finish_reason() or (FinishReason.LENGTH if is_full else None)


class Answers:
    """A StepResult, looked up by row."""

    def __init__(self, result: StepResult) -> None:
        self.tokens: dict[int, SampledToken] = {token.row: token for token in result.tokens}
        self.failed: dict[int, str] = {failure.row: failure.reason for failure in result.failed}
        self._scores: dict[int, PromptLogprobs] = {
            part.row: part for part in result.prompt_logprobs
        }

    def take_scores(self, request: Request, row: int) -> PromptLogprobs | None:
        """Prompt log-probabilities the caller does not have yet, and notes that he has them now.

        A preempted request computes its prompt again:

            given   1 ........... s-1 |
            now          f ........... s-1 | s ........ f+n-1      hands on [s, f+n)
        """
        part = self._scores.get(row)
        if part is None:
            return None
        num_known = request.num_scored - part.first
        assert num_known >= 0, f"{request.request_id} lacks log-probabilities before {part.first}"
        if num_known >= len(part.tokens):
            return None
        tokens = part.tokens[num_known:]
        part = PromptLogprobs(row, request.num_scored, tokens)
        request.num_scored += len(tokens)
        return part
