"""Owns the map from bytes of a checkpoint to the ranks of any layout, and the proof it is whole.

Pure data from headers and rules: opens no file and knows no tensor library.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec

from firstlight.checkpoint.names import Match, NameReport, WeightSpec
from firstlight.sharding.codecs import dtype_bytes
from firstlight.sharding.layout import Layout, Place
from firstlight.sharding.rules import Facts, TensorRule
from firstlight.sharding.slices import Slice, check_layout, covers_once, slice_for


class MappedRuns(msgspec.Struct, frozen=True, gc=False):
    """What a rank takes of a source tensor: `count` runs of `num_bytes`, `pitch` bytes apart, the
    first at `offset` of the file."""

    source: str
    file: Path
    offset: int
    count: int
    num_bytes: int
    pitch: int


@dataclass(frozen=True)
class RankShare:
    """What one rank takes: tensors, their bytes, and how many of these other ranks take too."""

    rank: int
    tensors: int
    num_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class SourceBytes:
    """Where every byte of a checkpoint goes: to one rank, to several, or to none."""

    once: int
    shared: int
    unused: int

    @property
    def total(self) -> int:
        """All bytes of the checkpoint's tensors."""
        return self.once + self.shared + self.unused


class _Class(NamedTuple):
    """Tensors of one unit that are cut alike; `matches` are in order of their experts."""

    rule: TensorRule
    width: int
    matches: list[Match]

    @property
    def num_bytes(self) -> int:
        """Bytes of one tensor."""
        return self.width * prod(self.rule.shape)


class ShardMap:
    """Which bytes of a checkpoint each rank of a layout takes."""

    def __init__(self, report: NameReport, spec: WeightSpec, layout: Layout) -> None:
        """Raises LayoutError when the model cannot be cut so."""
        check_layout(spec.facts, layout)
        self.layout = layout
        self._facts, self._report = spec.facts, report
        self._classes = _classes(report)

    def runs(self, rank: int) -> Iterator[MappedRuns]:
        """Yields what a rank takes of each tensor it takes anything of, units in load order."""
        for _, held, (skip, count, num_bytes, pitch) in self._taken(rank):
            for match in held:
                info = match.info
                offset = info.offset + skip
                yield MappedRuns(info.name, info.file, offset, count, num_bytes, pitch)

    def _taken(self, rank: int) -> Iterator[tuple[int, list[Match], tuple[int, int, int, int]]]:
        """Yields the number of each class a rank takes of, the tensors it takes of, their cut."""
        place = self.layout.place(rank)
        for number, one in enumerate(self._classes):
            held = _held(one, self._facts, place)
            part = slice_for(held[0].rule, self._facts, place) if held else None
            if part is not None and not part.zero and part.start < part.stop:
                yield number, held, _cut(one, part)

    @cached_property
    def shares(self) -> tuple[RankShare, ...]:
        """What every rank takes, in sums."""
        return tuple(self._share(rank) for rank in range(self.layout.world_size))

    def _share(self, rank: int) -> RankShare:
        tensors = num_bytes = shared = 0
        for number, held, (_, count, length, _) in self._taken(rank):
            taken = len(held) * count * length
            tensors += len(held)
            num_bytes += taken
            shared += taken if self._uses[number] > 1 else 0
        return RankShare(rank, tensors, num_bytes, shared)

    @cached_property
    def _uses(self) -> tuple[int, ...]:
        """How many ranks take each byte of a class."""
        return tuple(_ranks_of_a_byte(one, self._facts, self.layout) for one in self._classes)

    def uncovered(self) -> list[str]:
        """Proves that the ranks take every byte the model uses, each equally often; returns the
        names of the parameters for which they do not."""
        return [
            one.rule.name
            for one in self._classes
            if not one.rule.unused and not covers_once(one.rule, self._facts, self.layout)
        ]

    def source_bytes(self) -> SourceBytes:
        """Returns where the bytes of the checkpoint go; the sum is all of them."""
        sums: Counter[str] = Counter()
        for one, uses in zip(self._classes, self._uses, strict=True):
            kind = "unused" if one.rule.unused else "shared" if uses > 1 else "once"
            sums[kind] += len(one.matches) * one.num_bytes
        sums["unused"] += sum(info.num_bytes for info, _ in self._report.ignored)
        return SourceBytes(sums["once"], sums["shared"], sums["unused"])


def _classes(report: NameReport) -> list[_Class]:
    classes: dict[tuple[object, ...], _Class] = {}
    for match in report.matched:
        rule = match.rule
        # Experts of one parameter are alike; a parameter of its own name is a class of its own.
        key = (rule.name, match.info.dtype)
        found = classes.get(key)
        if found is None:
            found = classes[key] = _Class(rule, dtype_bytes(match.info.dtype), [])
        found.matches.append(match)
    return list(classes.values())


def _held(one: _Class, facts: Facts, place: Place) -> list[Match]:
    """Returns the tensors of a class that a rank takes a part of, if it takes any."""
    if one.rule.expert is None or place.layout.ep == 1:
        return one.matches
    own = place.experts(facts.num_experts)
    return [match for match in one.matches if match.rule.expert in own]


def _cut(one: _Class, part: Slice) -> tuple[int, int, int, int]:
    """Returns how a part lies in its tensor: bytes before it, runs, bytes of each, pitch."""
    rule = one.rule
    first = rule.source_rows[0] if rule.source_rows else 0
    skip = first * prod(rule.shape[1:]) * one.width
    if not rule.shape:
        return skip, 1, one.width, one.width
    inner = prod(rule.shape[part.dim + 1 :]) * one.width
    outer, pitch = prod(rule.shape[: part.dim]), rule.shape[part.dim] * inner
    return skip + part.start * inner, outer, (part.stop - part.start) * inner, pitch


def _ranks_of_a_byte(one: _Class, facts: Facts, layout: Layout) -> int:
    """Returns how many ranks take the first byte of the class's first tensor."""
    count = 0
    for rank in range(layout.world_size):
        part = slice_for(one.rule, facts, layout.place(rank))
        count += part is not None and not part.zero and part.start == 0 and part.stop > 0
    return count
