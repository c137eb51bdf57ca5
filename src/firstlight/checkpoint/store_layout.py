"""Owns where every byte of a store unit stands, computed from its record; opens no file.

A unit is blocks, a block `[count][G]` granules of one stride, a granule its parts in order:

    block ->  | expert 0: granule 0 | granule 1 | ... | expert 1: granule 0 | ...
    granule ->  | part 0 | part 1 (at a multiple of 64) | ... padding to 64 |

The last granule of a ragged block (vocabulary) may be short; it keeps the offsets of a full one.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from firstlight.sharding.codecs import dtype_bytes, find_codec
from firstlight.sharding.rules import ONCE, REPLICATED, VOCABULARY_GRANULE, Facts, TensorRule
from firstlight.sharding.slices import granule_count

PART_ALIGNMENT = 64
PAGE = 4096
PAGED_UNIT_BYTES = 4 * 2**20
DIGEST_BYTES = 16
ENTRY_BYTES = 24


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a block: `shape` is that of the whole tensor (of one expert), cut along `dim`.

    `dtype` is the type of its values, which a quantising `codec` holds as codes and scales.
    `sources` are its names in the source checkpoint, one an expert; `source_rows` the run of a
    fused source tensor. `unused` marks values the model never reads, kept for an exact round trip.
    """

    name: str
    sources: tuple[str, ...]
    source_dtype: str
    dtype: str
    shape: tuple[int, ...]
    dim: int = 0
    codec: str = "keep"
    source_rows: tuple[int, int] | None = None
    unused: bool = False


class BlockRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts cut along one axis into `granules`; `experts` are the ids held (empty: not experts).

    `piece_rows` is the length of a ragged granule, 0 where all granules are equal.
    """

    axis: str
    granules: int
    parts: tuple[PartRecord, ...]
    experts: tuple[int, ...] = ()
    piece_rows: int = 0

    @property
    def count(self) -> int:
        """Number of experts, 1 where there are none."""
        return max(1, len(self.experts))


class UnitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the store. `digest` is that of its .idx file, `source_digest` that of the source
    bytes it was made from; both are empty until it is written."""

    name: str
    alignment: int
    blocks: tuple[BlockRecord, ...]
    size: int
    digest: str = ""
    source_digest: str = ""


class PartPlace(NamedTuple):
    """Where one part stands in its granule, and the shape of its values there."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]


class GranuleKey(NamedTuple):
    """Names one granule: block, position of the expert in the block, granule."""

    block: int
    expert: int
    granule: int


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def granule_parts(block: BlockRecord, granule: int) -> list[PartPlace]:
    """Returns where the parts of a granule stand."""
    places, offset = [], 0
    for part in block.parts:
        full = _granule_shape(block, part, 0)
        shape = _granule_shape(block, part, granule)
        places.append(PartPlace(offset, part_bytes(part, shape), shape))
        offset += round_up(part_bytes(part, full), PART_ALIGNMENT)
    return places


def part_bytes(part: PartRecord, shape: tuple[int, ...]) -> int:
    """Returns the bytes that values of a shape take in the form of a part."""
    codec = find_codec(part.codec)
    return codec.matrix_bytes(shape) if codec.quantised else prod(shape) * dtype_bytes(part.dtype)


def stride(block: BlockRecord) -> int:
    """Returns the bytes from one granule of a block to the next."""
    last = granule_parts(block, 0)[-1]
    return round_up(last.offset + last.num_bytes, PART_ALIGNMENT)


def granule_bytes(block: BlockRecord, granule: int) -> int:
    """Returns the bytes of a granule in the file, its padding included."""
    last = granule_parts(block, granule)[-1]
    return round_up(last.offset + last.num_bytes, PART_ALIGNMENT)


def block_bytes(block: BlockRecord) -> int:
    """Returns the bytes of a block; only a ragged block (count 1) can end in a short granule."""
    return (block.count * block.granules - 1) * stride(block) + granule_bytes(
        block, block.granules - 1
    )


def block_offsets(unit: UnitRecord) -> list[int]:
    """Returns where each block of a unit begins in its file."""
    offsets, at = [], 0
    for block in unit.blocks:
        at = round_up(at, unit.alignment)
        offsets.append(at)
        at += block_bytes(block)
    return offsets


def gaps(unit: UnitRecord) -> list[tuple[int, int]]:
    """Returns offset and length of the zeros between the blocks of a unit."""
    found, at = [], 0
    for block, offset in zip(unit.blocks, block_offsets(unit), strict=True):
        if offset > at:
            found.append((at, offset - at))
        at = offset + block_bytes(block)
    return found


def granule_offset(unit: UnitRecord, key: GranuleKey) -> int:
    """Returns where a granule begins in the unit's file."""
    block = unit.blocks[key.block]
    row = key.expert * block.granules + key.granule
    return block_offsets(unit)[key.block] + row * stride(block)


def first_entries(unit: UnitRecord) -> list[int]:
    """Returns the number of each block's first granule, as the .idx counts them."""
    entries, at = [], 0
    for block in unit.blocks:
        entries.append(at)
        at += block.count * block.granules
    return entries


def granule_total(unit: UnitRecord) -> int:
    """Returns the number of granules of a unit."""
    return sum(block.count * block.granules for block in unit.blocks)


def granule_keys(unit: UnitRecord) -> Iterator[GranuleKey]:
    """Yields every granule of a unit in the order of its file."""
    for index, block in enumerate(unit.blocks):
        for expert in range(block.count):
            for granule in range(block.granules):
                yield GranuleKey(index, expert, granule)


def payload_bytes(unit: UnitRecord) -> int:
    """Returns the bytes of a unit without padding."""
    return sum(
        block.count * _stored_bytes(block, part) for block in unit.blocks for part in block.parts
    )


def _stored_bytes(block: BlockRecord, part: PartRecord) -> int:
    """Returns the bytes of a part in all granules; a scale that granules share is in each."""
    if not find_codec(part.codec).quantised:
        return part_bytes(part, part.shape)
    return block.granules * part_bytes(part, _granule_shape(block, part, 0))


def _granule_shape(block: BlockRecord, part: PartRecord, granule: int) -> tuple[int, ...]:
    if not part.shape:
        return ()
    length = part.shape[part.dim]
    if block.piece_rows:
        first = granule * block.piece_rows
        length = min(block.piece_rows, length - first)
    else:
        length //= block.granules
    return (*part.shape[: part.dim], length, *part.shape[part.dim + 1 :])


def describe_granule(unit: UnitRecord, key: GranuleKey) -> str:
    """Returns a granule's position and its tensors in words."""
    block = unit.blocks[key.block]
    expert = f", expert {block.experts[key.expert]}" if block.experts else ""
    names = ", ".join(part.name for part in block.parts)
    return f"unit {unit.name}, block {block.axis}{expert}, granule {key.granule} ({names})"


def uncovered_parts(unit: UnitRecord) -> list[str]:
    """Proves that the granules of a unit hold every element of its parts once; returns the names of
    parts for which they do not. Granules are disjoint by construction: they have one stride."""
    wrong = []
    for block in unit.blocks:
        for number, part in enumerate(block.parts):
            held = sum(
                prod(granule_parts(block, granule)[number].shape)
                for granule in (range(block.granules) if block.piece_rows else (0,))
            )
            held *= 1 if block.piece_rows else block.granules
            if held != prod(part.shape) or len(part.sources) != block.count:
                wrong.append(part.name)
    return wrong


def plan_units(parts: Iterable[tuple[TensorRule, PartRecord]], facts: Facts) -> list[UnitRecord]:
    """Returns the records of all units for a model's tensors, in load order.

    `parts` pairs each rule with its record; the records of one name (experts) become one part.
    """
    units: dict[str, dict[tuple[str, str, int], list[tuple[TensorRule, PartRecord]]]] = {}
    for rule, part in parts:
        axis = REPLICATED if rule.axis == ONCE else rule.axis
        granules = _granules(rule, part, facts)
        group = (axis, "expert" if rule.expert is not None else "", granules)
        units.setdefault(rule.unit, {}).setdefault(group, []).append((rule, part))
    records = []
    for name, groups in units.items():
        blocks = [_block(group[0], group[2], held, facts) for group, held in groups.items()]
        records.append(unit_record(name, blocks))
    return records


def _granules(rule: TensorRule, part: PartRecord, facts: Facts) -> int:
    if rule.axis in (REPLICATED, ONCE):
        return 1
    group = find_codec(part.codec).group(part.dim)
    return granule_count(facts.axes[rule.axis], part.shape[part.dim], group)


def _block(
    axis: str, granules: int, held: Sequence[tuple[TensorRule, PartRecord]], facts: Facts
) -> BlockRecord:
    ragged = axis in facts.axes and facts.axes[axis].ragged
    merged: dict[str, list[PartRecord]] = {}
    experts: dict[int, None] = {}
    for rule, part in held:
        key = part.name if rule.expert is None else _without_expert(rule)
        merged.setdefault(key, []).append(part)
        if rule.expert is not None:
            experts[rule.expert] = None
    parts = tuple(
        msgspec.structs.replace(same[0], name=name, sources=tuple(p.sources[0] for p in same))
        for name, same in merged.items()
    )
    rows = VOCABULARY_GRANULE if ragged else 0
    return BlockRecord(axis, granules, parts, tuple(experts), rows)


def _without_expert(rule: TensorRule) -> str:
    """Returns the name experts share; rules that name each expert apart get `*` in its place."""
    marked = [
        "*" if text == str(rule.expert) and index > 1 else text
        for index, text in enumerate(rule.name.split("."))
    ]
    return ".".join(marked)


def unit_record(name: str, blocks: Sequence[BlockRecord]) -> UnitRecord:
    """Returns the record of a unit of these blocks, its alignment and size computed."""
    unit = UnitRecord(name, PART_ALIGNMENT, tuple(blocks), 0)
    # Pages pay only where direct reads do; a small unit would be mostly padding.
    paged = payload_bytes(unit) >= PAGED_UNIT_BYTES
    unit = msgspec.structs.replace(unit, alignment=PAGE if paged else PART_ALIGNMENT)
    size = block_offsets(unit)[-1] + block_bytes(unit.blocks[-1])
    return msgspec.structs.replace(unit, size=size)
