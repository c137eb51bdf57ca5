"""Owns how the caches of a plan are put into sections of its report: what a sequence takes, and
what lies beyond the device.

Knows no arithmetic of plans: every number is planning's.
"""

from __future__ import annotations

from typing import Any

from firstlight.accept.report import Cell, Section
from firstlight.planning.explain import milli, short_count
from firstlight.planning.far_times import FarTimes
from firstlight.planning.memory import CACHES, MemoryPlan
from firstlight.planning.search import Answer
from firstlight.units import format_bytes, format_count


def cache_sections(answer: Answer) -> list[Section]:
    """Returns a section on what a sequence takes, and one on tiers where there are some."""
    memory = answer.memory
    if memory is None:
        return []
    found = [_sequence(answer, memory)]
    if answer.far is not None:
        found += [_places(answer, memory), _far(answer, memory, answer.far)]
    return found


def cache_data(answer: Answer) -> dict[str, Any] | None:
    """Returns the same as data: bytes of a rank, tokens, seconds."""
    memory, far = answer.memory, answer.far
    if memory is None:
        return None
    largest = _largest(memory)
    found: dict[str, Any] = {
        "sequence_bytes": dict(largest),
        "tokens": memory.places.tokens,
        "tier_bytes": memory.places.far_bytes._asdict(),
    }
    if far is not None:
        found |= {
            "beyond_pages": far.beyond._asdict(),
            "read_bytes": far.read_bytes,
            "reading": far.reading,
            "token": far.token,
            "anew": far.anew,
            "warm": {place: hit.seconds for place, hit in far.warm.items()},
        }
    return found


def _largest(memory: MemoryPlan) -> dict[str, int]:
    """What a sequence takes on the rank that holds most of it."""
    largest = max(memory.stages, key=lambda stage: sum(stage.sequence.values()))
    return dict(largest.sequence)


def _sequence(answer: Answer, memory: MemoryPlan) -> Section:
    asked, rules = answer.question.workload, answer.question.rules
    parts = _largest(memory)
    shown = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts.items())
    kept = rules.kv_dtype if rules.kv_dtype != "auto" else rules.dtype
    lines = [
        f"{short_count(asked.context)} tokens take {format_bytes(sum(parts.values()))} on a rank: "
        f"{shown}; {kept}, attention {rules.attention}"
    ]
    return Section("cache of one sequence", lines=tuple(lines))


def _places(answer: Answer, memory: MemoryPlan) -> Section:
    places, fleet = memory.places, answer.fleet
    sizes = {"device": memory.fullest.components[CACHES], **places.far_bytes._asdict()}
    rows: list[tuple[Cell, ...]] = [
        (place, format_bytes(sizes[place]), format_count(tokens))
        for place, tokens in places.tokens.items()
        if tokens
    ]
    whole = sum(places.tokens.values())
    ranks = min(fleet.machine, memory.arrangement.devices)
    lines = (
        f"{format_count(whole)} tokens on a rank in all; beside its caches a device holds "
        f"{format_bytes(places.tiers_bytes)} for what lies elsewhere: summaries and buffers",
        f"{ranks} ranks of a machine take {format_bytes(ranks * places.host_bytes)} of its "
        f"memory and {format_bytes(ranks * places.far_bytes.disk)} of its disk",
    )
    columns = ("place", "each rank", "tokens")
    return Section("cache beyond the device", lines=lines, columns=columns, rows=tuple(rows))


def _far(answer: Answer, memory: MemoryPlan, far: FarTimes) -> Section:
    asked = answer.question.workload
    tokens = {p: n * memory.places.block_size for p, n in far.beyond._asdict().items()}
    where = ", ".join(f"{format_count(n)} on {p}" for p, n in tokens.items() if n)
    at = short_count(asked.context)
    rows: list[tuple[Cell, ...]] = [
        (
            f"next token at {at}, alone",
            milli(far.token),
            f"{where}; {format_bytes(far.read_bytes)} a rank read in {milli(far.reading)}"
            if where
            else "all on the device",
        )
    ]
    for place, hit in far.warm.items():
        ratio = far.anew / hit.seconds
        against = f"{ratio:.0f} times" if ratio >= 2 else f"{ratio:.2f} times"
        rows.append(
            (
                f"{format_count(hit.tokens)} tokens found on {place}",
                milli(hit.seconds),
                f"{format_bytes(hit.num_bytes)} a rank; anew {milli(far.anew)}, {against} as long",
            )
        )
    note = "expected; a prompt whose fetch would take longer than computing is computed"
    return Section(
        "times of state beyond",
        lines=(note,),
        columns=("what", "time", "because"),
        rows=tuple(rows),
    )
