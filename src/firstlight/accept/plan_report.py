"""Owns how a plan, a search for hardware and a rehearsal are put into reports.

Knows no arithmetic of plans: every number is planning's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from firstlight.accept.plan_caches import cache_data, cache_sections
from firstlight.accept.report import Cell, Check, Report, Section
from firstlight.planning.emit import Launch
from firstlight.planning.explain import load_text, milli, verdict
from firstlight.planning.fleets import FleetAnswer
from firstlight.planning.memory import COMPONENTS, TIERS, MemoryPlan
from firstlight.planning.plan_file import PlanFile
from firstlight.planning.predict import Band, Forecast
from firstlight.planning.rehearse import Outcome, Rehearsal
from firstlight.planning.search import Answer
from firstlight.units import format_bytes, format_count, format_seconds

TITLE = "firstlight plan"


def plan_report(
    answer: Answer, plan: PlanFile | None, launches: Sequence[Launch], rehearsal: Rehearsal | None
) -> Report:
    """Turns an answer into the report the command shows; the data is the plan file's."""
    sections = [_asked(answer)]
    checks = [_fits(answer)]
    if answer.memory is not None and answer.forecast is not None:
        sections += [_memory(answer.memory), *cache_sections(answer)]
        sections += [_times(answer.forecast), _start(answer.forecast)]
        checks.append(_targets(answer))
    sections.append(_lost(answer))
    if answer.ways_out:
        sections.append(Section("what would help", steps=answer.ways_out))
    sections += [_launch(launch) for launch in launches]
    if rehearsal is not None:
        sections.append(_rehearsal(rehearsal))
    return Report(TITLE, tuple(sections), tuple(checks), _data(answer, plan, rehearsal))


def rehearsal_report(
    answer: Answer,
    rehearsal: Rehearsal,
    builds: Sequence[Any],
    outcomes: Sequence[Outcome],
) -> Report:
    """Turns a rehearsal of loads, groups and modules into the report of `up --rehearse`.

    `builds` are one built rank for each set of ranks that hold equal shapes.
    """
    sections = [_asked(answer)]
    memory = answer.nearest
    if memory is not None:
        sections.append(_memory(memory))
    if answer.forecast is not None:
        sections.append(_start(answer.forecast))
    sections += [_built(rehearsal, builds), _rehearsal(rehearsal)]
    checks = (*map(_check, outcomes), _fits(answer))
    data = {
        "layout": {name: getattr(rehearsal.layout, name) for name in ("tp", "pp", "dp", "ep")},
        "ranks": [msgspec.to_builtins(load) for load in rehearsal.loads],
        "built": [msgspec.to_builtins(built) for built in builds],
        "failures": [one.name for one in (*rehearsal.failures, *outcomes) if not one.holds],
    }
    return Report("firstlight up --rehearse", tuple(sections), checks, data)


def _built(rehearsal: Rehearsal, builds: Sequence[Any]) -> Section:
    read = {load.rank: load.read_bytes for load in rehearsal.loads}
    tensors = {load.rank: load.num_tensors for load in rehearsal.loads}
    rows: list[tuple[Cell, ...]] = []
    for built in builds:
        last = built.ranks[-1]
        rows.append(
            (
                _ranks_text(built.ranks),
                format_bytes(built.num_bytes),
                format_bytes(read[last]),
                format_count(tensors[last]),
                format_count(built.num_parameters),
                f"{built.seconds:.1f} s",
            )
        )
    columns = ("ranks", "held each", "read each", "tensors read", "parameters", "built in")
    return Section("what each rank loads and builds", columns=columns, rows=tuple(rows))


def _ranks_text(ranks: Sequence[int]) -> str:
    runs = [
        list(run) for _, run in groupby(enumerate(sorted(ranks)), key=lambda one: one[1] - one[0])
    ]
    return ", ".join(
        f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs
    )


def fleets_report(found: Sequence[FleetAnswer]) -> Report:
    """Turns the smallest fleets into the report the command shows."""
    columns = ("devices", "arrangement", "left on a rank", "TTFT", "TPOT", "tokens/s", "why not")
    works = [one for one in found if one.works]
    table = Section(
        "smallest fleets, fewest devices first",
        columns=columns,
        rows=tuple(_fleet_row(one) for one in found),
        checks=(
            Check(
                "a fleet keeps the load and the targets",
                "ok" if works else "fail",
                works[0].answer.fleet.text if works else f"none of {len(found)} devices",
            ),
        ),
    )
    data = {"fleets": [_fleet_data(one) for one in found]}
    return Report(TITLE, (table,), data=data)


def band_text(band: Band) -> str:
    """Writes a time and its band."""
    return f"{milli(band.expected)} ({milli(band.low)} .. {milli(band.high)})"


def _asked(answer: Answer) -> Section:
    work, device = answer.question.workload, answer.fleet.device
    images = f", {work.images} images of {work.image_tokens} tokens" if work.images else ""
    lines = [
        f"{answer.fleet.text}: {format_bytes(device.memory.expected)} each; "
        f"memory for {load_text(work)}",
        f"requests of {work.input_tokens} tokens in, {work.output_tokens} out{images}",
        f"{answer.num_considered} arrangements, {answer.num_fitting} fit",
    ]
    if device.unpublished:
        names = ", ".join(name.replace("_", " ") for name in device.unpublished)
        lines.append(f"not published for {device.name}, so a range: {names}")
    return Section("asked", lines=tuple(lines))


def _fits(answer: Answer) -> Check:
    if answer.nearest is None:
        detail = "the model cannot be cut for this number of devices"
    else:
        detail = verdict(answer.nearest, answer.question.workload)
    if answer.memory is not None:
        return Check("memory", "ok", detail)
    return Check("memory", "fail", detail, "; ".join(answer.ways_out))


def _targets(answer: Answer) -> Check:
    targets = answer.question.targets
    if targets.ttft is None and targets.tpot is None:
        return Check("targets", "ok", "none asked")
    return Check("targets", "fail" if answer.misses else "ok", answer.misses or "kept")


def _memory(memory: MemoryPlan) -> Section:
    rows: list[tuple[Cell, ...]] = []
    used = [c for c in COMPONENTS if c != TIERS or any(s.components[c] for s in memory.stages)]
    for _, alike in groupby(memory.stages, key=lambda stage: dict(stage.components)):
        stages = list(alike)
        first, last = stages[0].ranks.start, stages[-1].ranks.stop - 1
        sizes = (format_bytes(stages[0].components[c]) for c in used)
        name = f"{first}-{last}" if last > first else str(first)
        rows.append((name, *sizes, format_bytes(stages[0].spare)))
    parts = memory.worst.parts["weights"]
    shown = ", ".join(
        f"{k} {format_bytes(v)}" for k, v in sorted(parts.items(), key=lambda p: -p[1])
    )
    return Section(
        f"memory of each rank: {memory.arrangement.text}",
        lines=(f"weights of rank {memory.worst.ranks.start}: {shown}",),
        columns=("ranks", *used, "left"),
        rows=tuple(rows),
    )


def _times(forecast: Forecast) -> Section:
    speed, rate = forecast.expected, forecast.tokens_per_second
    spent = speed.decode
    rows: tuple[tuple[Cell, ...], ...] = (
        ("TTFT", band_text(forecast.ttft)),
        ("TPOT", band_text(forecast.tpot)),
        ("output tokens/s", f"{rate.expected:,.0f} ({rate.low:,.0f} .. {rate.high:,.0f})"),
        ("in a step: matrices", milli(spent.weights)),
        ("in a step: attention", milli(spent.attention)),
        ("in a step: small kernels", milli(spent.small_kernels)),
        ("in a step: collectives", milli(spent.collectives)),
        ("in TPOT: prompts of others", milli(speed.others)),
        ("in TTFT: images", milli(speed.encode)),
    )
    note = "expected (optimistic .. pessimistic software); not measured on this hardware"
    return Section("predicted", lines=(note,), columns=("what", "time"), rows=rows)


def _start(forecast: Forecast) -> Section:
    rows = tuple(
        (phase.name, format_seconds(phase.seconds), phase.detail) for phase in forecast.cold_start
    )
    total = format_seconds(sum(phase.seconds for phase in forecast.cold_start))
    columns = ("phase", "time", "because")
    return Section(f"cold start, {total}", columns=columns, rows=rows)


def _lost(answer: Answer) -> Section:
    title = "why the next ones lost" if answer.memory is not None else "nearest, none fits"
    rows = tuple((one.arrangement.text, one.reason) for one in answer.lost)
    return Section(title, columns=("arrangement", "reason"), rows=rows)


def _launch(launch: Launch) -> Section:
    notes = tuple(f"note: {note}" for note in launch.notes)
    return Section(f"launch settings: {launch.target}", lines=(*launch.lines, *notes))


def _rehearsal(rehearsal: Rehearsal) -> Section:
    checks = tuple(map(_check, rehearsal.outcomes))
    loads = rehearsal.loads
    lines: tuple[str, ...] = ()
    if loads:
        most = max(loads, key=lambda load: load.read_bytes)
        total = sum(load.read_bytes for load in loads)
        lines = (
            f"{format_count(len(loads))} ranks read {format_bytes(total)} in all; rank {most.rank} "
            f"most: {format_bytes(most.read_bytes)} of {format_count(most.num_tensors)} tensors",
        )
    return Section("rehearsal", lines=lines, checks=checks)


def _check(outcome: Outcome) -> Check:
    return Check(outcome.name, "ok" if outcome.holds else "fail", outcome.detail)


def _fleet_row(one: FleetAnswer) -> tuple[Cell, ...]:
    answer = one.answer
    if answer.memory is None or answer.forecast is None:
        reason = answer.lost[0].reason if answer.lost else "cannot be cut for so many"
        return f"{one.limit}x{one.device.name}", "-", "-", "-", "-", "-", reason
    forecast = answer.forecast
    return (
        answer.fleet.text,
        answer.memory.arrangement.text,
        format_bytes(answer.memory.worst.spare),
        band_text(forecast.ttft),
        band_text(forecast.tpot),
        f"{forecast.tokens_per_second.expected:,.0f}",
        answer.misses or "-",
    )


def _fleet_data(one: FleetAnswer) -> dict[str, Any]:
    memory = one.answer.memory
    return {
        "device": one.device.name,
        "works": one.works,
        "devices": one.answer.fleet.count,
        "arrangement": memory.arrangement.text if memory else None,
        "misses": one.answer.misses,
    }


def _data(answer: Answer, plan: PlanFile | None, rehearsal: Rehearsal | None) -> dict[str, Any]:
    lost = [
        {
            "arrangement": one.arrangement.text,
            "fits": one.memory.fits,
            "spare_bytes": one.memory.worst.spare,
            "tpot": one.speed.tpot if one.speed else None,
            "reason": one.reason,
        }
        for one in answer.lost
    ]
    loads = [msgspec.to_builtins(load) for load in rehearsal.loads] if rehearsal else []
    return {
        "plan": msgspec.to_builtins(plan) if plan else None,
        "cache": cache_data(answer),
        "lost": lost,
        "ways_out": list(answer.ways_out),
        "considered": answer.num_considered,
        "fitting": answer.num_fitting,
        "ranks": loads,
    }
