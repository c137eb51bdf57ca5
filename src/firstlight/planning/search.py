"""Owns the choice among arrangements: what fits, what is best, and why each of the next lost.

Knows no device by name; every reason carries its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from firstlight.errors import LayoutError
from firstlight.models.spec import ModelSpec
from firstlight.planning.arrangement import Arrangement, arrangements, check, divisors
from firstlight.planning.constants import EXPECTED
from firstlight.planning.explain import missed, short_count, shortage, slower
from firstlight.planning.far_times import FarTimes, far_times
from firstlight.planning.hardware import Fleet
from firstlight.planning.memory import TIERS, MemoryPlan, plan_memory
from firstlight.planning.predict import Forecast, Speed, forecast, speed
from firstlight.planning.rates import rates_of
from firstlight.planning.work import ModelWork, planned_work
from firstlight.planning.workload import PlanRules, Targets, Workload
from firstlight.sharding.layout import Layout
from firstlight.units import format_bytes

NEXT_SHOWN = 5
_MOST_ISLANDS = 16


@dataclass(frozen=True)
class Question:
    """What is asked of the planner."""

    spec: ModelSpec
    fleet: Fleet
    workload: Workload
    rules: PlanRules = field(default_factory=PlanRules)
    objective: str = "latency"
    targets: Targets = field(default_factory=Targets)


@dataclass(frozen=True)
class Lost:
    """An arrangement that was not chosen, and why."""

    arrangement: Arrangement
    memory: MemoryPlan
    speed: Speed | None
    reason: str


@dataclass(frozen=True)
class Answer:
    """The plan chosen, None when nothing fits; `lost` are the next best. `ways_out` say what would
    help when nothing fits. `fleet` are the devices used. `far` are times of what lies outside the
    device, where there are tiers."""

    question: Question
    fleet: Fleet
    memory: MemoryPlan | None
    forecast: Forecast | None
    lost: tuple[Lost, ...]
    num_considered: int
    num_fitting: int
    ways_out: tuple[str, ...] = ()
    far: FarTimes | None = None

    @property
    def nearest(self) -> MemoryPlan | None:
        """The plan, or what comes nearest when nothing fits; None when the model cannot be cut."""
        return self.memory or (self.lost[0].memory if self.lost else None)

    @property
    def misses(self) -> str:
        """Which target even the best plan misses; empty when none."""
        return missed(self.forecast, self.question.targets) if self.forecast else ""


@dataclass(frozen=True)
class _Fitting:
    memory: MemoryPlan
    speed: Speed
    misses: str


def search(question: Question) -> Answer:
    """Returns the best arrangement of a fleet for the objective, or of a part of it when the
    cheapest is asked for.
    """
    work = planned_work(question.spec, question.rules)
    if question.objective != "cheapest":
        return _search(question, work, question.fleet)
    answer = None
    for count in device_counts(question.fleet):
        fleet = replace_count(question.fleet, count)
        if not may_hold(work, fleet, question.rules) and count < question.fleet.count:
            continue
        answer = _search(question, work, fleet)
        if answer.memory is not None and not answer.misses:
            return answer
    return answer or _search(question, work, question.fleet)


def evaluate(question: Question, layout: Layout, replicas: int = 1, shared: int = 1) -> Answer:
    """Returns the answer for one given arrangement. Raises LayoutError when the model cannot be
    cut so or the fleet has fewer devices.
    """
    reason = check(question.spec, layout)
    arrangement = Arrangement(layout, replicas, shared)
    if reason:
        raise LayoutError(reason)
    if arrangement.devices > question.fleet.count:
        raise LayoutError(
            f"{arrangement.text} needs {arrangement.devices} devices, the fleet has "
            f"{question.fleet.count}"
        )
    work = planned_work(question.spec, question.rules)
    return _judge(question, work, question.fleet, [arrangement])


def _search(question: Question, work: ModelWork, fleet: Fleet) -> Answer:
    shared = question.rules.context_parallel
    found = arrangements(question.spec, fleet.count, island=fleet.island, context_parallel=shared)
    return _judge(question, work, fleet, found)


def _judge(
    question: Question, work: ModelWork, fleet: Fleet, given: Iterable[Arrangement]
) -> Answer:
    workload, rules = question.workload, question.rules
    plans = [plan_memory(work, one, fleet, workload, rules) for one in given]
    rates = rates_of(fleet, EXPECTED, rules.dtype)
    fitting = []
    for memory in (plan for plan in plans if plan.fits):
        found = speed(work, memory.arrangement, rates, workload, rules)
        fitting.append(_Fitting(memory, found, missed(found, question.targets)))
    fitting.sort(key=_order(question.objective, fleet.island))
    best = fitting[0] if fitting else None
    tiered = best.memory if best and rules.tiers else None
    rest = sorted((p for p in plans if not p.fits), key=lambda p: -p.worst.spare)
    return Answer(
        question=question,
        fleet=fleet,
        memory=best.memory if best else None,
        forecast=forecast(work, best.memory, fleet, workload, rules) if best else None,
        lost=tuple(_lost(fitting, rest, question.objective)),
        num_considered=len(plans),
        num_fitting=len(fitting),
        ways_out=() if best or not rest else ways_out(work, rest[0], fleet, workload, rules),
        far=far_times(work, tiered, fleet, workload, rules) if tiered else None,
    )


def _order(objective: str, island: int) -> Callable[[_Fitting], tuple[float, ...]]:
    """What is asked first, then tensor parallelism within an island, then fewer stages."""

    def key(one: _Fitting) -> tuple[float, ...]:
        layout = one.memory.arrangement.layout
        times = (one.speed.tpot, one.speed.ttft)
        first = (-one.speed.tokens_per_second,) if objective == "throughput" else times
        return (float(bool(one.misses)), *first, float(layout.tp > island), layout.pp)

    return key


def _lost(fitting: list[_Fitting], rest: list[MemoryPlan], objective: str) -> Iterator[Lost]:
    shown = fitting[1 : NEXT_SHOWN + 1]
    for one in shown:
        reason = one.misses or slower(one.speed, fitting[0].speed, objective)
        yield Lost(one.memory.arrangement, one.memory, one.speed, reason)
    for memory in rest[: NEXT_SHOWN - len(shown)]:
        yield Lost(memory.arrangement, memory, None, shortage(memory.worst))


def ways_out(
    work: ModelWork, nearest: MemoryPlan, fleet: Fleet, workload: Workload, rules: PlanRules
) -> tuple[str, ...]:
    """Returns changes each of which alone makes the nearest arrangement fit, in numbers."""
    arrangement = nearest.arrangement
    ways = []
    sequences = most_sequences(work, arrangement, fleet, workload, rules)
    if sequences:
        ways.append(f"lower the concurrency to {sequences}")
    context = most_context(work, arrangement, fleet, workload, rules)
    if context:
        ways.append(f"lower the context to {context} tokens ({short_count(context)})")
    share = (
        1
        - (nearest.worst.used - nearest.worst.components["reserve"]) / fleet.device.memory.expected
    )
    if share > 0:
        percent = int(share * 1000) / 10
        ways.append(f"lower the reserve from {rules.reserve_share:.0%} to {percent:.1f}%")
    if taken := nearest.worst.components[TIERS]:
        ways.append(f"make tiers smaller, which take {format_bytes(taken)} of the device")
    ways.append(f"use devices with {format_bytes(-nearest.worst.spare)} more memory")
    found = [f"{arrangement.text}: {way}" for way in ways]
    if enough := enough_devices(work, fleet, workload, rules):
        found.append(f"{enough.count} devices hold it ({enough.text})")
    return tuple(found)


def enough_devices(
    work: ModelWork, fleet: Fleet, workload: Workload, rules: PlanRules
) -> Fleet | None:
    """Returns the smallest larger fleet of the same devices that holds the load, in whole islands
    up to four times as many, at least 16; None when that is not enough.
    """
    now = fleet.count // fleet.island
    for islands in range(now + 1, max(4 * now, _MOST_ISLANDS) + 1):
        larger = Fleet(islands * fleet.island, fleet.device, fleet.island)
        if may_hold(work, larger, rules):
            for one in arrangements(work.spec, larger.count, island=larger.island):
                if plan_memory(work, one, larger, workload, rules).fits:
                    return larger
    return None


def most_sequences(
    work: ModelWork, arrangement: Arrangement, fleet: Fleet, workload: Workload, rules: PlanRules
) -> int:
    """Returns the largest concurrency that fits at the context asked; 0 when not even one does."""

    def fits(number: int) -> bool:
        asked = replace(workload, concurrency=number)
        return plan_memory(work, arrangement, fleet, asked, rules).fits

    return _largest(fits, 1, 1 << 20)


def most_context(
    work: ModelWork, arrangement: Arrangement, fleet: Fleet, workload: Workload, rules: PlanRules
) -> int:
    """Returns the longest context, in whole blocks, that fits at the concurrency asked; 0 when
    none does.
    """
    size = rules.block_size
    least = -(-(workload.input_tokens + workload.output_tokens) // size)
    most = work.spec.context_length // size

    def fits(blocks: int) -> bool:
        asked = replace(workload, context=blocks * size)
        return plan_memory(work, arrangement, fleet, asked, rules).fits

    return _largest(fits, least, most) * size


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Returns the largest number from least to most that fits, 0 when none; fitting is monotone."""
    if least > most or not fits(least):
        return 0
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def device_counts(fleet: Fleet) -> tuple[int, ...]:
    """Returns the numbers of devices worth trying: parts of an island, then whole islands."""
    parts = [n for n in divisors(fleet.island) if n < fleet.count]
    islands = [fleet.island * n for n in range(2, max(2, fleet.count // fleet.island))]
    few = [n for i, n in enumerate(islands) if i < 15 or (n // fleet.island) % 8 == 0]
    return tuple(sorted({*parts, *few, fleet.count}))


def replace_count(fleet: Fleet, count: int) -> Fleet:
    """Returns a fleet of another number of the same devices."""
    return Fleet(count, fleet.device, min(fleet.island, count))


def may_hold(work: ModelWork, fleet: Fleet, rules: PlanRules) -> bool:
    """Says whether the weights alone, cut without a copy, are not too much for the fleet."""
    usable = fleet.count * fleet.device.memory.expected * (1 - rules.reserve_share)
    return work.table.total_bytes <= usable
