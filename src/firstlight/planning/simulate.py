"""Owns what requests in a closed loop are given by an engine that is walked through step by step.

Knows the engine's order of work (answers first, then prompts in chunks within a budget) and takes
the time of a step from the cost model; one pipeline stage. Seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from statistics import median

from firstlight.planning.cost import CostModel, Step
from firstlight.planning.workload import PlanRules, Workload

# Requests of each client; the first of each only warms up, as in a benchmark.
ROUNDS = 3
# Past tokens are taken in steps of so many, so that equal steps are priced once.
_PAST_GRAIN = 32
_RECURRENT = "recurrent"


@dataclass(frozen=True)
class Served:
    """Medians over requests: seconds to the first token, and between two tokens of an answer."""

    ttft: float
    tpot: float


@dataclass
class _Request:
    """A request: when it was sent and reaches the engine, tokens computed, times of its tokens."""

    sent: float
    arrives: float
    computed: int = 0
    written: int = 0
    first: float = 0.0


@dataclass
class _Loop:
    """Clients that each send the next request when the last was answered; one process reads all of
    them, one after the other."""

    seconds_to_read: float
    requests_left: int
    reader_free: float = 0.0
    waiting: deque[_Request] = field(default_factory=deque)
    done: list[tuple[float, float]] = field(default_factory=list)

    def send(self, now: float) -> None:
        """A client sends its next request, if there is one."""
        if self.requests_left:
            self.requests_left -= 1
            self.reader_free = max(self.reader_free, now) + self.seconds_to_read
            self.waiting.append(_Request(now, self.reader_free))


def simulate(model: CostModel, sequences: int, workload: Workload, rules: PlanRules) -> Served:
    """Returns what `sequences` clients see, each with a request of the workload's lengths in
    flight.
    """
    prompt = workload.input_tokens + workload.images * workload.image_tokens
    price = _priced(model)
    constants = model.rates.constants
    loop = _Loop(constants.request, sequences * ROUNDS)
    for _ in range(sequences):
        loop.send(0.0)
    running: list[_Request] = []
    now = 0.0
    while running or loop.waiting:
        if not running:
            now = max(now, loop.waiting[0].arrives)
        parts = _compose(model, running, loop.waiting, now, (prompt, rules))
        each = price([step for _, step in parts])
        each += constants.host + constants.sequence * len(parts)
        times = _repeats(parts, loop.waiting, now, each, workload.output_tokens)
        now += times * each
        for request, step in parts:
            _advance(request, step.tokens * times, prompt, now)
        for request in [r for r in running if r.written == workload.output_tokens]:
            running.remove(request)
            between = (now - request.first) / max(1, workload.output_tokens - 1)
            loop.done.append((request.first - request.sent, between))
            loop.send(now)
    warm = loop.done[sequences:] or loop.done
    return Served(median(t for t, _ in warm), median(t for _, t in warm))


def _compose(
    model: CostModel,
    running: list[_Request],
    waiting: deque[_Request],
    now: float,
    asked: tuple[int, PlanRules],
) -> list[tuple[_Request, Step]]:
    """The parts of the next step: a token of each answer, then chunks of prompts in their order;
    requests that have arrived begin while there is room.
    """
    prompt, rules = asked
    answers = [r for r in running if r.computed >= prompt]
    parts = [(r, Step(1, 1, float(r.computed))) for r in answers]
    budget = rules.max_batch_tokens - len(parts)
    pending = deque(r for r in running if r.computed < prompt)
    while budget > 0 and (pending or (waiting and waiting[0].arrives <= now)):
        if pending:
            request = pending.popleft()
        else:
            request = waiting.popleft()
            running.append(request)
        count = min(budget, rules.chunk_tokens, _end_of_chunk(model, request, prompt, rules))
        parts.append((request, Step(count, 1, float(request.computed), prompt=True)))
        budget -= count
    return parts


def _end_of_chunk(model: CostModel, request: _Request, prompt: int, rules: PlanRules) -> int:
    """Tokens to the prompt's end, or to its last whole block where a state is kept there."""
    keeps = any(kind.state.kind == _RECURRENT for kind in model.work.kinds)
    last = (prompt - 1) // rules.block_size * rules.block_size
    return (last if keeps and request.computed < last else prompt) - request.computed


def _repeats(
    parts: Sequence[tuple[_Request, Step]],
    waiting: Sequence[_Request],
    now: float,
    each: float,
    output: int,
) -> int:
    """How many steps like this one follow: while nobody has a prompt, ends, or arrives."""
    if any(step.prompt for _, step in parts):
        return 1
    least = min(output - request.written for request, _ in parts)
    past = sum(step.past for _, step in parts) / len(parts)
    least = min(least, _PAST_GRAIN - int(past) % _PAST_GRAIN)
    if waiting and each > 0:
        least = min(least, ceil((waiting[0].arrives - now) / each))
    return max(1, least)


def _advance(request: _Request, tokens: int, prompt: int, now: float) -> None:
    """Tokens were computed: of the prompt, whose last gives the first of the answer, or of it."""
    if request.computed >= prompt:
        request.written += tokens
    request.computed += tokens
    if request.computed == prompt:
        request.written, request.first = 1, now


def _priced(model: CostModel) -> Callable[[Sequence[Step]], float]:
    """Returns the time of a step by its parts; equal ones are worked out once."""

    @cache
    def price(answers: int, past: int, prompts: tuple[tuple[int, int], ...]) -> float:
        steps = [Step(count, 1, float(before), prompt=True) for count, before in prompts]
        if answers:
            steps.append(Step(answers, answers, float(past)))
        return model.joint(steps)

    def of(parts: Sequence[Step]) -> float:
        answers = [p for p in parts if not p.prompt]
        past = sum(p.past for p in answers) / max(1, len(answers))
        prompts = tuple(
            (p.tokens, int(p.past) // _PAST_GRAIN * _PAST_GRAIN) for p in parts if p.prompt
        )
        return price(len(answers), int(past) // _PAST_GRAIN * _PAST_GRAIN, prompts)

    return of
