"""Owns `up --rehearse`: a start gone through on this machine for every rank, with nothing loaded.

Knows how a plan, a rehearsal of loads and one of modules come together; the work is theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from firstlight.errors import LayoutError, UsageError

if TYPE_CHECKING:
    from firstlight.accept.report import Report
    from firstlight.assembly.rehearsal import BuiltRank
    from firstlight.models.spec import ModelSpec
    from firstlight.planning.hardware import Fleet
    from firstlight.planning.plan_file import PlanFile
    from firstlight.planning.rehearse import Outcome, Rehearsal
    from firstlight.planning.search import Answer

_GROUPS = "process groups are made"


@dataclass(frozen=True, kw_only=True)
class RehearsalAsked:
    """What is to be rehearsed: a plan file's start, or the best plan for `devices` and a load."""

    model: Path
    plan: Path | None
    devices: str | None
    context: int | None
    concurrency: int
    images: int
    dtype: str = "bfloat16"


def rehearse_start(asked: RehearsalAsked) -> Report:
    """Goes through plan, shard map, load lists, process groups and modules of all ranks.

    Ranks of equal shapes are built once. Raises UsageError when neither plan nor devices are given,
    LayoutError when the model cannot be cut for them.
    """
    from firstlight.accept.plan_report import rehearsal_report
    from firstlight.cli.plan import read_model, read_names
    from firstlight.planning.rehearse import rehearse
    from firstlight.planning.weights import weight_table

    spec = read_model(asked.model)
    answer, plan = _answer(asked, spec)
    memory = answer.nearest
    if memory is None:
        raise LayoutError("the model cannot be cut for this number of devices")
    dtype = answer.question.rules.dtype
    table, layout = weight_table(spec, dtype), memory.arrangement.layout
    rehearsal = rehearse(spec, table, layout, read_names(asked.model), memory)
    builds, outcomes = _build(spec, rehearsal, dtype)
    outcomes = [*outcomes, *_serve_can(plan)]
    return rehearsal_report(answer, rehearsal, builds, outcomes)


def _answer(asked: RehearsalAsked, spec: ModelSpec) -> tuple[Answer, PlanFile | None]:
    from firstlight.planning.hardware import parse_fleet
    from firstlight.planning.plan_file import plan_of, read_plan
    from firstlight.planning.search import Question, evaluate, search
    from firstlight.planning.start import question_of
    from firstlight.planning.weights import weight_table
    from firstlight.planning.workload import PlanRules, Workload, request_lengths

    if asked.plan is not None:
        plan = read_plan(asked.plan)
        question = question_of(plan, spec)
        shared = plan.context_parallel
        return evaluate(question, plan.layout, plan.replicas, shared), plan
    if asked.devices is None:
        raise UsageError("nothing to rehearse; give --plan FILE, or --devices 64xS5000@8")
    context = asked.context or spec.context_length
    lengths = request_lengths(context)
    load = Workload(
        context=context,
        concurrency=asked.concurrency,
        images=asked.images,
        input_tokens=lengths[0],
        output_tokens=lengths[1],
    )
    fleet: Fleet = parse_fleet(asked.devices)
    answer = search(Question(spec, fleet, load, PlanRules(dtype=asked.dtype)))
    if answer.memory is None:
        return answer, None
    total = weight_table(spec, asked.dtype).total_bytes
    return answer, plan_of(answer, str(asked.model), total)


def _build(
    spec: ModelSpec, rehearsal: Rehearsal, dtype: str
) -> tuple[tuple[BuiltRank, ...], list[Outcome]]:
    """Makes the groups of every rank and the modules of one of each shape."""
    if not rehearsal.loads:
        return (), []
    import torch

    from firstlight.assembly.rehearsal import rehearse_builds, rehearse_groups
    from firstlight.kernels.builtin import reference_kernels
    from firstlight.planning.rehearse import Outcome, process_groups

    layout = rehearsal.layout
    groups = process_groups(layout)["tp"]
    problem = rehearse_groups(layout, groups)
    builds = rehearse_builds(
        spec, layout, _alike(rehearsal), kernels=reference_kernels(), dtype=getattr(torch, dtype)
    )
    made = f"{layout.world_size} ranks, {len(groups)} groups of {len(groups[0])}"
    held = {load.rank: load.held_bytes for load in rehearsal.loads}
    failed = [f"rank {b.ranks[-1]}: {b.problem}" for b in builds if b.problem]
    off = [
        f"rank {b.ranks[-1]}: {b.num_bytes:,} of {held[b.ranks[-1]]:,}"
        for b in builds
        if not b.problem and b.num_bytes != held[b.ranks[-1]]
    ]
    shapes = f"{len(builds)} different ranks stand for {layout.world_size}"
    return builds, [
        Outcome(_GROUPS, not problem, problem or made),
        Outcome("modules are built and cut", not failed, "; ".join(failed) or shapes),
        Outcome("modules hold what the plan says", not off, "; ".join(off) or "exact"),
    ]


def _alike(rehearsal: Rehearsal) -> Sequence[Sequence[int]]:
    """Ranks by the classes of weights they hold; cut axes are dealt evenly, so no more counts."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for load in rehearsal.loads:
        found[load.shapes].append(load.rank)
    return list(found.values())


def _serve_can(plan: PlanFile | None) -> list[Outcome]:
    from firstlight.planning.rehearse import Outcome
    from firstlight.planning.start import suggested_settings

    if plan is None:
        return []
    try:
        suggested_settings(plan, "this plan")
    except UsageError as error:
        return [Outcome("serve takes the plan", False, str(error))]
    return [Outcome("serve takes the plan", True, "every degree has an option")]
