"""Owns the scheduler's counters and how they add up; knows no policy."""

from collections import Counter

import msgspec

from firstlight.schedule.request import FinishReason, Request


class SchedulerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, but `waiting` and `running`, which are of now.

    received = waiting + running + all `finished` + all `refused` (by the code of the refusal).
    `prompt_tokens` are those of requests that have started, `cached_tokens` the part of them found
    in the cache then; `computed_tokens` include what was computed again after preemptions.
    Of `preemptions` `swaps` left their state outside the device; `fetches` brought state from there
    for a request, `late_fetches` did so after the first step it could have been in, and
    `recomputed_tokens` could have been brought but were computed, as the quicker way. `lost_units`
    are those outside the device whose content was lost.
    `held_back` says why the first waiting request was not admitted in the last step, if it was not.
    """

    received: int
    waiting: int
    running: int
    finished: dict[FinishReason, int]
    refused: dict[str, int]
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    held_back: str | None
    swaps: int = 0
    fetches: int = 0
    late_fetches: int = 0
    recomputed_tokens: int = 0
    lost_units: int = 0


class Tally:
    """The counters behind SchedulerCounts."""

    def __init__(self) -> None:
        self.received = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.output_tokens = 0
        self.swaps = 0
        self.fetches = 0
        self.late_fetches = 0
        self.recomputed_tokens = 0
        self.lost_units = 0
        self.finished: Counter[FinishReason] = Counter()
        self.refused: Counter[str] = Counter()
        self.held_back: str | None = None

    def start(self, request: Request) -> None:
        """Counts a prompt once, however often its request is preempted."""
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += request.num_cached

    def counts(self, *, waiting: int, running: int) -> SchedulerCounts:
        """A picture of now."""
        return SchedulerCounts(
            received=self.received,
            waiting=waiting,
            running=running,
            finished=dict(self.finished),
            refused=dict(self.refused),
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            held_back=self.held_back,
            swaps=self.swaps,
            fetches=self.fetches,
            late_fetches=self.late_fetches,
            recomputed_tokens=self.recomputed_tokens,
            lost_units=self.lost_units,
        )

    def check_integrity(self, *, waiting: int, running: int) -> None:
        """Checks that no request was counted twice or lost."""
        ended = sum(self.finished.values()) + sum(self.refused.values())
        assert self.received == waiting + running + ended, "the request counters do not add up"
        assert self.cached_tokens <= self.prompt_tokens, "more prompt tokens found than asked for"
