"""Owns the list of granule reads one rank makes from a store, as pure data; opens no file."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from firstlight.checkpoint.read_plan import LARGEST_READ, Target
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    PartRecord,
    UnitRecord,
    block_offsets,
    first_entries,
    granule_bytes,
    stride,
)
from firstlight.errors import LayoutError, StoreError
from firstlight.sharding.rules import TensorRule


class GranuleRead(msgspec.Struct, frozen=True, gc=False):
    """A run of `granules` granules from `key` on: `num_bytes` at `offset` of the unit's file, whose
    digests begin at entry number `entry`. `targets` has one place for each part of the block, None
    where the rank holds zeros; `at` is how many granules of the rank come before this run."""

    unit: UnitRecord
    key: GranuleKey
    granules: int
    at: int
    entry: int
    offset: int
    num_bytes: int
    targets: tuple[Target | None, ...]


def plan_granule_reads(
    units: Sequence[UnitRecord], targets: Sequence[Target], *, largest_read: int = LARGEST_READ
) -> tuple[GranuleRead, ...]:
    """Returns the reads that fill the targets from a store, in file order, units in load order.

    Raises StoreError naming every target the store does not hold as the config describes it, and
    LayoutError when a layout would cut a granule.
    """
    places: _Places = {}
    for target in targets:
        places.setdefault(target.rule.name, {})[target.rule.expert] = target
    reads: list[GranuleRead] = []
    filled = 0
    for unit in units:
        for index, start in enumerate(_starts(unit)):
            block = unit.blocks[index]
            per_read = max(1, largest_read // start.stride)
            for position, held in _held(block, places):
                filled += len(held) - held.count(None)
                key = GranuleKey(index, position, 0)
                reads.extend(_runs(unit, key, held, start=start, per_read=per_read))
    if filled != len(targets):
        raise StoreError(_absent(units, places))
    return tuple(reads)


_Places = dict[str, dict[int | None, Target]]


def _held(block: BlockRecord, places: _Places) -> Iterator[tuple[int, tuple[Target | None, ...]]]:
    """Yields the positions of a block that a rank reads, and where each part lands."""
    experts = block.experts or (None,)
    columns = []
    for part in block.parts:
        if "*" in part.name and block.experts:
            names = [part.name.replace("*", str(expert)) for expert in experts]
            column = [places.get(n, {}).get(e) for n, e in zip(names, experts, strict=True)]
        else:
            column = list(map(places.get(part.name, {}).get, experts))
        _check_shape(part, next((t for t in column if t is not None), None))
        columns.append(column)
    for position, held in enumerate(zip(*columns, strict=True)):
        if held.count(None) < len(held):
            yield position, held


def _check_shape(part: PartRecord, target: Target | None) -> None:
    if target is not None and (target.rule.shape, target.rule.dim) != (part.shape, part.dim):
        raise StoreError(
            f"{part.name}: the store holds {list(part.shape)} cut along dim {part.dim}, the "
            f"config says {list(target.rule.shape)} along {target.rule.dim}"
        )


def _absent(units: Sequence[UnitRecord], places: _Places) -> str:
    found = {
        (target.rule.name, target.rule.expert)
        for unit in units
        for block in unit.blocks
        for _, held in _held(block, places)
        for target in held
        if target is not None
    }
    absent = [name for name, own in places.items() for expert in own if (name, expert) not in found]
    return f"the store holds no values for: {', '.join(absent[:50])}"


class _Start(NamedTuple):
    """Where a block begins in its file and its index; the bytes of a granule and of the last."""

    offset: int
    entry: int
    stride: int
    last: int


def _starts(unit: UnitRecord) -> list[_Start]:
    return [
        _Start(offset, entry, stride(block), granule_bytes(block, block.granules - 1))
        for block, offset, entry in zip(
            unit.blocks, block_offsets(unit), first_entries(unit), strict=True
        )
    ]


def _runs(
    unit: UnitRecord,
    key: GranuleKey,
    held: tuple[Target | None, ...],
    *,
    start: _Start,
    per_read: int,
) -> Iterator[GranuleRead]:
    """Cuts a rank's run of granules into reads; a short last granule is a read of its own."""
    some = next((t for t in held if t is not None), None)
    if some is None:
        return
    block, whole = unit.blocks[key.block], start.stride
    first, stop = granule_range(block, some)
    base = start.offset + key.expert * block.granules * whole
    entry = start.entry + key.expert * block.granules
    short = start.last != whole
    at = first
    while at < stop:
        last_full = block.granules - 1 if short else block.granules
        end = at + 1 if at >= last_full else min(stop, at + per_read, last_full)
        num_bytes = (end - at - 1) * whole + (start.last if end == block.granules else whole)
        yield GranuleRead(
            unit=unit,
            key=GranuleKey(key.block, key.expert, at),
            granules=end - at,
            at=at - first,
            entry=entry + at,
            offset=base + at * whole,
            num_bytes=num_bytes,
            targets=held,
        )
        at = end


def granule_range(block: BlockRecord, target: Target) -> tuple[int, int]:
    """Returns the granules [first, stop) that make up a rank's part.

    Raises LayoutError when the part begins or ends inside a granule.
    """
    rule, part = target.rule, target.part
    if not rule.shape or (block.granules == 1 and not block.piece_rows):
        return 0, 1
    length = rule.shape[rule.dim]
    if part.start == part.stop:
        return 0, 0  # a rank beyond the end of a ragged axis
    if block.piece_rows:
        return part.start // block.piece_rows, -(-part.stop // block.piece_rows)
    if (part.start * block.granules) % length or (part.stop * block.granules) % length:
        raise LayoutError(_cut_inside(rule, block))
    return part.start * block.granules // length, part.stop * block.granules // length


def _cut_inside(rule: TensorRule, block: BlockRecord) -> str:
    legal = [d for d in range(1, block.granules + 1) if block.granules % d == 0]
    return (
        f"{rule.name}: the store holds it in {block.granules} pieces along {block.axis}, which "
        f"this layout would cut; legal degrees: {', '.join(map(str, legal))}"
    )
