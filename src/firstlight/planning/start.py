"""Owns the memory plan of one start, made from what `serve` was told: with a plan file or without.

Knows no engine. The sentence that refuses a start is the one that `plan` refuses the same load by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from firstlight.errors import OutOfBudget, UsageError
from firstlight.models.spec import ModelSpec
from firstlight.planning.arrangement import Arrangement
from firstlight.planning.emit import serve_values
from firstlight.planning.explain import verdict
from firstlight.planning.hardware import HOST_VENDOR, Device, Figure, Fleet, parse_fleet
from firstlight.planning.memory import MemoryPlan, plan_memory
from firstlight.planning.plan_file import PlanFile
from firstlight.planning.search import Question, ways_out
from firstlight.planning.weights import ELEMENT_BYTES, weight_table
from firstlight.planning.work import planned_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.settings.serve import ServeSettings
from firstlight.settings.settings import fields_of
from firstlight.sharding.layout import Layout
from firstlight.units import format_bytes

_UNKNOWN = Figure(None, "not asked: memory alone is planned", low=1.0, high=1.0)


def suggested_settings(plan: PlanFile, path: str) -> Mapping[str, int | str]:
    """Returns what a plan says of the settings of `serve`.

    Raises UsageError for a plan that one engine on one machine cannot carry out.
    """
    lacking = [
        f"{name} {value}"
        for name, value in (
            ("pp", plan.pp),
            ("dp", plan.dp),
            ("context_parallel", plan.context_parallel),
        )
        if value > 1
    ]
    if lacking:
        raise UsageError(
            f"{path}: `serve` cannot start {', '.join(lacking)}; plan with `--tp N` for what it "
            "can, or take the plan's settings for another engine (--emit)"
        )
    if plan.cache_element_bytes != ELEMENT_BYTES[plan.dtype]:
        raise UsageError(
            f"{path}: planned with cached values of {plan.cache_element_bytes} B, `serve` keeps "
            "them in the compute type; plan with --cache-dtype same"
        )
    known = fields_of(ServeSettings)
    return {name: value for name, value in serve_values(plan).items() if name in known}


def check_plan(plan: PlanFile, spec: ModelSpec, settings: ServeSettings) -> None:
    """Raises UsageError when a plan is another model's, or another layout's than asked for."""
    weights = weight_table(spec, plan.dtype).total_bytes
    if (plan.family, plan.weight_bytes) != (spec.family.name, weights):
        raise UsageError(
            f"{settings.plan} is the plan of a {plan.family} model of "
            f"{format_bytes(plan.weight_bytes)}, {settings.model} is a {spec.family.name} model of "
            f"{format_bytes(weights)} in {plan.dtype}; plan this model, or leave --plan out"
        )
    for name in ("tp", "ep", "dtype"):
        planned, asked = getattr(plan, name), getattr(settings, name)
        if planned != asked:
            raise UsageError(
                f"{settings.plan} is a plan for {name} {planned}, asked for is {name} {asked}; "
                f"plan again with that, or leave one of the two out"
            )


@dataclass(frozen=True, kw_only=True)
class StartLoad:
    """What a start is to hold, as far as memory depends on it.

    `sequences` of `context` tokens must fit at once, or one where tiers take what the device cannot
    hold; one device a rank has `memory_bytes`, its own or the host's.
    """

    layout: Layout
    context: int
    memory_bytes: int
    sequences: int = 1
    images: int = 0
    image_tokens: int = 1024
    rules: PlanRules
    owned: bool = True

    @property
    def workload(self) -> Workload:
        """The load as plans have it; lengths of requests do not matter to memory."""
        return Workload(
            context=max(2, self.context),
            concurrency=self.sequences,
            images=self.images,
            image_tokens=self.image_tokens,
            input_tokens=1,
            output_tokens=1,
        )

    @property
    def fleet(self) -> Fleet:
        """The devices of the ranks, of which nothing but memory is known."""
        count = self.layout.world_size
        memory = Figure(float(self.memory_bytes), "said at start")
        device = Device(
            name="device",
            vendor="" if self.owned else HOST_VENDOR,
            island=count,
            machine=count,
            memory=memory,
            memory_bandwidth=_UNKNOWN,
            bf16_rate=_UNKNOWN,
            link_bandwidth=_UNKNOWN,
            network_bandwidth=_UNKNOWN,
            host_bandwidth=_UNKNOWN,
        )
        return Fleet(count, device, count)


def question_of(plan: PlanFile, spec: ModelSpec) -> Question:
    """Returns what a plan file was the answer to, times of requests left out.

    Of devices that the catalogue lacks only the memory is known, as the plan has it.
    """
    size = plan.cache_element_bytes
    rules = PlanRules(
        dtype=plan.dtype,
        block_size=plan.block_size,
        chunk_tokens=plan.chunk_tokens,
        max_batch_tokens=plan.max_batch_tokens,
        cache_element_bytes=None if size == ELEMENT_BYTES[plan.dtype] else size,
        reserve_share=plan.reserve_share,
        kv_dtype=plan.kv_dtype,
        encoder_cache_bytes=plan.encoder_cache_bytes,
        attention=plan.attention,
        tiers=plan.tiers,
    )
    load = StartLoad(
        layout=plan.layout,
        context=plan.context,
        memory_bytes=plan.ranks[0].device_bytes,
        sequences=plan.concurrency,
        images=plan.images,
        image_tokens=plan.image_tokens,
        rules=rules,
    )
    try:
        fleet = parse_fleet(plan.fleet)
    except UsageError:
        count = plan.layout.world_size * plan.replicas
        fleet = Fleet(count, load.fleet.device, min(count, load.fleet.island))
    memory = Figure(float(load.memory_bytes), "the plan's")
    fleet = structs.replace(fleet, device=structs.replace(fleet.device, memory=memory))
    return Question(spec, fleet, load.workload, rules)


def start_load(
    settings: ServeSettings,
    spec: ModelSpec,
    *,
    free_bytes: int,
    owned: bool = True,
    plan: PlanFile | None = None,
) -> StartLoad:
    """Returns what a start with these settings is to hold: with a plan all that was planned,
    without one a single sequence.

    `free_bytes`: what each rank's device has left, which is its own memory (`owned`) or the host's.
    A device may have less free than it has memory by what is kept of it, for that is what drivers
    take.
    """
    rules = PlanRules(
        dtype=settings.dtype,
        block_size=settings.block_size,
        chunk_tokens=settings.step_limits.chunk_tokens,
        max_batch_tokens=settings.step_limits.max_batch_tokens,
        kv_dtype=settings.kv_dtype,
        encoder_cache_bytes=settings.encoder_cache_bytes,
        weights_budget_bytes=settings.weights_budget_bytes,
        attention=settings.attention,
        tiers=settings.tiers,
    )
    if plan is not None:
        rules = replace(rules, reserve_share=plan.reserve_share)
    asked = settings.memory_bytes or (plan.ranks[0].device_bytes if plan else free_bytes)
    return StartLoad(
        layout=Layout(tp=settings.tp, ep=settings.ep),
        context=settings.context or spec.context_length,
        memory_bytes=min(asked, free_bytes + int(asked * rules.reserve_share)),
        sequences=min(settings.max_sequences, plan.sequences_per_part) if plan else 1,
        images=plan.images if plan else 0,
        image_tokens=plan.image_tokens if plan else 1024,
        rules=rules,
        owned=owned,
    )


def plan_start(spec: ModelSpec, load: StartLoad) -> MemoryPlan:
    """Returns the memory of every rank of a start."""
    work = planned_work(spec, load.rules)
    return plan_memory(work, Arrangement(load.layout), load.fleet, load.workload, load.rules)


def check_start(spec: ModelSpec, load: StartLoad) -> MemoryPlan:
    """Returns the memory of a start that fits.

    Raises OutOfBudget with the sentence of `plan`, and what would help.
    """
    memory = plan_start(spec, load)
    if not memory.fits:
        work = planned_work(spec, load.rules)
        ways = ways_out(work, memory, load.fleet, load.workload, load.rules)
        raise OutOfBudget(f"{verdict(memory, load.workload)}. What would help: {'; '.join(ways)}")
    return memory
