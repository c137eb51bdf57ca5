"""A rank that keeps rows only by applying plans; its model computes from what its slots hold."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from firstlight.cache.manager import CacheManager
from firstlight.schedule.answers import RequestUpdate
from firstlight.schedule.request import Request, SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import (
    FailedRow,
    PromptLogprobs,
    SampledToken,
    SequenceStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from firstlight.sharding.state_spec import GroupedQueryState

VOCABULARY = 50
SPECS = (
    GroupedQueryState(kv_heads=2, head_dim=4),
    GroupedQueryState(kv_heads=1, head_dim=4, window=8),
)


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def origin(submitted: SubmittedRequest) -> str:
    """What the model sees besides tokens. The salt is in it so that sharing across salts shows."""
    return digest(submitted.salt, submitted.media_digests)


def choose(slots: list[str]) -> int:
    return int(digest(*slots), 16) % VOCABULARY


def score(slot: str, token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -int(digest(slot, token), 16) / 2**64, 0, [])


def content(start: str, tokens: list[int]) -> list[str]:
    """What each position's slot must hold: it depends on all tokens up to there."""
    slots = [start]
    for token in tokens:
        slots.append(digest(slots[-1], token))
    return slots[1:]


def undisturbed(submitted: SubmittedRequest, limit: int) -> list[int]:
    """The output of this request served alone, without any cache."""
    tokens = list(submitted.prompt_ids)
    while True:
        output = tokens[len(submitted.prompt_ids) :]
        if len(output) >= submitted.params.max_tokens or (output and len(tokens) >= limit):
            return output
        if output and output[-1] in submitted.params.end_token_ids:
            return output
        tokens.append(choose(content(origin(submitted), tokens)))


@dataclass
class RankRow:
    request_id: str
    tokens: list[int]
    num_prompt: int
    scored: bool
    blocks: list[list[int]]


@dataclass
class Rank:
    """Rows as plans describe them, and the slots of every block of every group."""

    submitted: dict[str, SubmittedRequest]
    block_size: int
    rows: dict[int, RankRow] = field(default_factory=dict)
    slots: dict[tuple[int, int, int], str] = field(default_factory=dict)
    poison: dict[str, int] = field(default_factory=dict)  # known tokens at which a request fails

    def run(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        result = StepResult(plan.step, [], [], [], 0.0)
        for step in plan.steps:
            self._compute(step, result)
        return result

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            del self.rows[row]
        for new in plan.new:
            assert new.row not in self.rows, f"row {new.row} is given twice"
            scored = new.params.prompt_logprobs is not None
            blocks = [list(blocks) for blocks in new.blocks]
            self.rows[new.row] = RankRow(
                new.request_id, list(new.token_ids), new.num_prompt, scored, blocks
            )
        for step in plan.steps:
            row = self.rows[step.row]
            row.tokens += step.new_tokens
            for blocks, more in zip(row.blocks, step.new_blocks, strict=False):
                blocks += more

    def _compute(self, step: SequenceStep, result: StepResult) -> None:
        row, end = self.rows[step.row], step.start + step.count
        start = origin(self.submitted[row.request_id])
        failing = self.poison.get(row.request_id, 10**9) <= end
        for position in range(step.start, end):
            for group in range(len(row.blocks)):
                before = self._slot(row, group, position - 1) if position else start
                value = "NaN" if failing else digest(before, row.tokens[position])
                self.slots[self._place(row, group, position)] = value
        if failing:
            result.failed.append(FailedRow(step.row, "logits are not finite"))
            return
        if row.scored and step.start + 1 < row.num_prompt:
            last = min(end, row.num_prompt - 1)
            scores = [
                score(self._slot(row, 0, p - 1), row.tokens[p])
                for p in range(step.start + 1, last + 1)
            ]
            result.prompt_logprobs.append(PromptLogprobs(step.row, step.start + 1, scores))
        if step.sample:
            assert end == len(row.tokens)
            # Groups hold equal content, so that each of them must be right for the right answer.
            for group in range(len(row.blocks)):
                read = [self._slot(row, group, p) for p in range(end)]
                token = choose(read)
                if group and token != result.tokens[-1].token_id:
                    raise AssertionError("two groups disagree about their content")
                if not group:
                    result.tokens.append(SampledToken(step.row, token, None))

    def _place(self, row: RankRow, group: int, position: int) -> tuple[int, int, int]:
        return group, row.blocks[group][position // self.block_size], position % self.block_size

    def _slot(self, row: RankRow, group: int, position: int) -> str:
        return self.slots.get(self._place(row, group, position), "never written")


class Service:
    """A scheduler with its rank. Every step compares what the two know and recounts everything."""

    def __init__(self, *, num_blocks: int = 33, block_size: int = 4, **limits: int) -> None:
        chosen = {
            "max_sequences": 4,
            "max_batch_tokens": 16,
            "chunk_tokens": 8,
            "max_waiting": 1000,
            "context_length": 60,
        } | limits
        self.settings = SchedulerSettings(**chosen)
        self.cache = CacheManager(
            SPECS, num_blocks=num_blocks, block_size=block_size, model_digest="model"
        )
        self.scheduler = Scheduler(self.settings, self.cache)
        self.limit = min(self.settings.context_length, self.cache.max_tokens)
        self.submitted: dict[str, SubmittedRequest] = {}
        self.rank = Rank(self.submitted, block_size)
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.pending: StepPlan | None = None
        self.num_steps = 0

    def add(self, prompt: list[int], *, max_tokens: int = 4, **fields: Any) -> str:
        request_id = f"r{len(self.submitted)}"
        params = {"max_tokens": max_tokens}
        for name in ("end_token_ids", "prompt_logprobs", "min_tokens"):
            if name in fields:
                params[name] = fields.pop(name)
        submitted = SubmittedRequest(
            request_id=request_id, prompt_ids=prompt, params=SamplingParams(**params), **fields
        )
        self.submitted[request_id] = submitted
        self.updates[request_id] = []
        self.scheduler.add(submitted)
        return request_id

    def cancel(self, *request_ids: str) -> None:
        self._take(self.scheduler.cancel(request_ids))

    def begin(self) -> StepPlan | None:
        """Schedules a step and checks the plan; finish() must follow."""
        self.pending = plan = self.scheduler.schedule()
        if plan is not None:
            self.num_steps += 1
            assert plan.num_tokens <= self.settings.max_batch_tokens
            assert all(0 < step.count <= self.settings.chunk_tokens for step in plan.steps)
            first = self.scheduler._running.first
            assert first is not None and first.row in {step.row for step in plan.steps}
        return plan

    def finish(self) -> None:
        plan, self.pending = self.pending, None
        if plan is None:
            return
        known = self._known(plan)
        result = self.rank.run(plan)
        for step, (tokens, blocks, start) in zip(plan.steps, known, strict=True):
            row = self.rank.rows[step.row]
            if tokens is not None:
                assert (row.tokens, row.blocks, step.start) == (tokens, blocks, start)
        self._take(self.scheduler.update(result))
        self.scheduler.check_integrity()

    def step(self) -> StepPlan | None:
        plan = self.begin()
        self.finish()
        return plan

    def run(self, most_steps: int = 2000) -> None:
        """Steps until nothing is left to do."""
        while self.scheduler.has_work:
            assert self.num_steps < most_steps, "the requests do not come to an end"
            self.step()

    def output(self, request_id: str) -> list[int]:
        return [token for update in self.updates[request_id] for token in update.token_ids]

    def expected(self, request_id: str) -> list[int]:
        return undisturbed(self.submitted[request_id], self.limit)

    def request(self, request_id: str) -> Request:
        return self.scheduler._requests[request_id]

    def _known(self, plan: StepPlan) -> list[tuple[Any, Any, Any]]:
        """What the scheduler knows of each step's request; nothing once it was cancelled."""
        by_row = {request.row: request for request in self.scheduler._running}
        known: list[tuple[Any, Any, Any]] = []
        for step in plan.steps:
            request = by_row.get(step.row)
            if request is None:
                known.append((None, None, None))
            else:
                blocks = self.cache.blocks(request)
                known.append((list(request.token_ids), blocks, request.num_computed))
        return known

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            told = self.updates[update.request_id]
            assert not told or told[-1].finish is None, "an update after the last one"
            told.append(update)


@pytest.fixture
def make_service() -> type[Service]:
    return Service
