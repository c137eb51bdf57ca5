"""Owns the rehearsal of a start: what every rank would load and which checks would fail, from rules
and headers alone.

Knows no device, no process and no tensor; ranks that hold equal slices are worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from firstlight.errors import LayoutError
from firstlight.models.spec import ModelSpec
from firstlight.planning.explain import shortage
from firstlight.planning.memory import WEIGHTS, MemoryPlan
from firstlight.planning.weights import ELEMENT_BYTES, WeightClass, WeightTable
from firstlight.sharding.layout import Layout, Place
from firstlight.sharding.slices import check_layout, covers_once, local_shape, slice_for
from firstlight.units import format_bytes

_SHOWN = 5


@dataclass(frozen=True)
class RankLoad:
    """What one rank loads: source tensors it reads of, bytes read, bytes allocated.

    `shapes` counts the parameters of each class of weights in the rule table: ranks that agree on
    it hold equal shapes.
    """

    rank: int
    stage: int
    num_tensors: int
    read_bytes: int
    held_bytes: int
    shapes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One thing that was checked; `detail` says what was found, with names or numbers."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Rehearsal:
    """Every rank's load and every check of one replica."""

    layout: Layout
    loads: tuple[RankLoad, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The checks that would fail."""
        return tuple(outcome for outcome in self.outcomes if not outcome.holds)


@dataclass(frozen=True)
class SourceNames:
    """What an index says: names of the tensors in the files, and their bytes in all, None when it
    does not say."""

    names: Collection[str]
    total_bytes: int | None = None


def rehearse(
    spec: ModelSpec,
    table: WeightTable,
    layout: Layout,
    source: SourceNames | None = None,
    memory: MemoryPlan | None = None,
) -> Rehearsal:
    """Returns what each rank would load and which checks would fail.

    `source` adds the comparison with a checkpoint's index, `memory` that with a plan. A layout that
    the model cannot be cut by is one failure and no loads.
    """
    try:
        check_layout(spec.facts, layout)
    except LayoutError as error:
        return Rehearsal(layout, (), (Outcome("layout", False, str(error)),))
    loads = tuple(_loads(table, layout))
    outcomes = [Outcome("layout", True, f"{layout.world_size} ranks"), _groups(layout)]
    outcomes.append(_coverage(table, layout))
    if source is not None:
        outcomes.extend(_names(spec, table, source))
    if memory is not None:
        outcomes.extend(_memory(loads, memory))
    return Rehearsal(layout, loads, tuple(outcomes))


def _loads(table: WeightTable, layout: Layout) -> list[RankLoad]:
    @cache
    def cut_at(
        index: int, tp_index: int, ep_index: int, expert_tp_index: int
    ) -> tuple[int, int, int]:
        one = table.classes[index]
        place = Place(flat, 0, 0, 0, tp_index, ep_index, expert_tp_index)
        return _cut(table, one, place)

    flat = Layout(tp=layout.tp, dp=layout.dp, ep=layout.ep)  # stages are counted, not cut
    loads = []
    for rank in range(layout.world_size):
        place = layout.place(rank)
        counts = table.stage_counts(layout.pp, place.pp_index)
        tensors = read = held = 0
        for index, count in enumerate(counts):
            if count:
                at = (place.tp_index, place.ep_index, place.expert_tp_index)
                key = (0, *at[1:]) if table.classes[index].is_expert else (at[0], 0, 0)
                found = cut_at(index, *key)
                tensors += count * found[0]
                read += count * found[1]
                held += count * found[2]
        loads.append(RankLoad(rank, place.pp_index, tensors, read, held, counts))
    return loads


def _cut(table: WeightTable, one: WeightClass, place: Place) -> tuple[int, int, int]:
    """Tensors read, bytes read and bytes held of one class in one layer by one rank."""
    copies = one.copies // place.layout.ep if one.is_expert else one.copies
    # A class stands for its first expert; another rank's experts are cut the same way.
    at = place if not one.is_expert else Place(place.layout, 0, 0, 0, 0, 0, place.expert_tp_index)
    part = slice_for(one.tensor, table.facts, at)
    if part is None:
        return 0, 0, 0
    held = prod(local_shape(one.tensor, part)) * table.width(one.tensor)
    real = part.stop - part.start
    read = 0 if part.zero or not real else held * real // part.length
    return copies * bool(read), copies * read, copies * held


def _groups(layout: Layout) -> Outcome:
    """Proves that the ranks of each kind of group partition the world."""
    bad = [
        name
        for name, groups in process_groups(layout).items()
        if sorted(r for group in groups for r in group) != list(range(layout.world_size))
    ]
    detail = ", ".join(
        f"{len(groups)} of {len(groups[0])} for {name}"
        for name, groups in process_groups(layout).items()
    )
    return Outcome(
        "process groups", not bad, f"not a partition: {', '.join(bad)}" if bad else detail
    )


def process_groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Returns the ranks of every tensor, data, pipeline and expert parallel group."""
    places = [layout.place(rank) for rank in range(layout.world_size)]

    def grouped(key: Callable[[Place], tuple[int, ...]]) -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for place in places:
            groups.setdefault(key(place), []).append(place.rank)
        return list(groups.values())

    return {
        "tp": grouped(lambda p: (p.pp_index, p.dp_index)),
        "dp": grouped(lambda p: (p.pp_index, p.tp_index)),
        "pp": grouped(lambda p: (p.dp_index, p.tp_index)),
        "ep": grouped(lambda p: (p.pp_index, p.expert_tp_index)),
    }


def _coverage(table: WeightTable, layout: Layout) -> Outcome:
    """Proves for each rule that the ranks hold every element, once or equally often."""
    broken = [
        one.tensor.name
        for one in table.classes
        if not one.tensor.unused and not covers_once(one.tensor, table.facts, layout)
    ]
    if broken:
        return Outcome("every element is held", False, _listed(broken))
    return Outcome("every element is held", True, f"{len(table.classes)} rules")


def _names(spec: ModelSpec, table: WeightTable, source: SourceNames) -> list[Outcome]:
    wanted = {rule.source for rule in spec.tensors}
    required = {rule.source for rule in spec.tensors if not rule.optional}
    names = set(source.names)
    missing, extra = sorted(required - names), sorted(names - wanted)
    found = [
        Outcome("no tensor is missing", not missing, _listed(missing) or f"{len(names):,} names"),
        Outcome("no tensor is unexpected", not extra, _listed(extra) or f"{len(wanted):,} rules"),
    ]
    if source.total_bytes is not None:
        found.append(_bytes_agree(table, source.total_bytes))
    return found


def _bytes_agree(table: WeightTable, total_bytes: int) -> Outcome:
    """Compares the index with the rules; files may hold another type than is computed in."""
    sizes = dict.fromkeys((table.element_bytes, *ELEMENT_BYTES.values()))
    ours = [_source_bytes(replace(table, element_bytes=size)) for size in sizes]
    found = total_bytes if total_bytes in ours else ours[0]
    detail = f"{found:,} by the rules, {total_bytes:,} in the index"
    return Outcome("bytes agree", found == total_bytes, detail)


def _source_bytes(table: WeightTable) -> int:
    """Bytes of all parameters and of what a source holds beside them."""
    unused = (c for c in table.classes if c.tensor.unused)
    beside = sum(table.whole_bytes(c) * c.num_tensors for c in unused)
    return table.total_bytes + beside


def _memory(loads: tuple[RankLoad, ...], memory: MemoryPlan) -> list[Outcome]:
    planned: Mapping[int, int] = {
        rank: stage.components[WEIGHTS] for stage in memory.stages for rank in stage.ranks
    }
    off = [load for load in loads if load.held_bytes != planned[load.rank]]
    detail = ", ".join(f"rank {r.rank}: {r.held_bytes:,} of {planned[r.rank]:,}" for r in off[:3])
    worst = memory.worst
    spare = f"rank {worst.ranks.start} has {format_bytes(max(0, worst.spare))} left"
    if not memory.fits:
        spare = shortage(worst)
    return [
        Outcome("weights as planned", not off, detail or f"{len(loads)} ranks, exact"),
        Outcome("memory", memory.fits, spare),
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
