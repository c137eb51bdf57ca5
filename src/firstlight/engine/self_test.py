"""Owns the requests an engine asks of itself before anybody else may: served on the same path, to
their end. Knows no policy and takes no verdict.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firstlight.checkpoint.known_answers import KnownCase
from firstlight.engine.ranks import RankGroup
from firstlight.errors import CheckFailed, RequestError
from firstlight.runner.protocol import RunStep, StepDone, joint_result
from firstlight.schedule.admission import RefusalCode
from firstlight.schedule.request import SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.step import StepPlan, TokenLogprobs

# Tokens generated one by one from the first half of each known text.
DECODE_TOKENS = 6


@dataclass
class Served:
    """What one request of the engine's own brought."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)


def serve_to_end(
    ranks: RankGroup,
    scheduler: Scheduler,
    requests: Sequence[SubmittedRequest],
    *,
    advanced: Callable[[], None],
    on_step: Callable[[StepPlan, Sequence[StepDone]], None],
) -> list[Served]:
    """Serves requests before anybody else can and returns what they brought, in their order.

    `advanced` hears that something moved, `on_step` each step with its answers.

    Raises CheckFailed when one of them ends with an error.
    """
    served = {request.request_id: Served() for request in requests}
    pending = deque(requests)
    _add_while_there_is_room(scheduler, pending)
    while (plan := scheduler.schedule()) is not None:
        ranks.send(RunStep(plan))
        done = ranks.collect(StepDone, on_progress=lambda _: advanced())
        advanced()
        on_step(plan, done)
        for update in scheduler.update(joint_result(done)):
            if update.error is not None:
                raise CheckFailed(f"{update.request_id}: {update.error}")
            found = served[update.request_id]
            found.token_ids += update.token_ids
            found.logprobs += update.logprobs or []
            found.scores += update.prompt_logprobs.tokens if update.prompt_logprobs else []
        _add_while_there_is_room(scheduler, pending)
    return list(served.values())


def _add_while_there_is_room(scheduler: Scheduler, pending: deque[SubmittedRequest]) -> None:
    """Queues requests in order; a queue that is full takes the rest after the next step."""
    while pending:
        try:
            scheduler.add(pending[0])
        except RequestError as refusal:
            if refusal.code == RefusalCode.QUEUE_FULL.value and scheduler.has_work:
                return
            raise
        pending.popleft()


def scoring_request(name: str, token_ids: Sequence[int]) -> SubmittedRequest:
    """Asks for the log-probability of every token of a sequence: the prefill path."""
    return SubmittedRequest(
        request_id=name,
        prompt_ids=list(token_ids),
        params=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1),
        salt=name,
    )


def decoding_request(case: KnownCase) -> SubmittedRequest:
    """Asks for a few tokens one by one after the first half of a text: the decode path."""
    half = max(1, len(case.token_ids) // 2)
    # The whole stays shorter than the text, which is known to fit the context.
    num_tokens = max(1, min(DECODE_TOKENS, len(case.token_ids) - half - 1))
    return SubmittedRequest(
        request_id=f"decode-{case.name}",
        prompt_ids=case.token_ids[:half],
        params=SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=1),
        salt=case.name,
    )
