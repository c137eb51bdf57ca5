"""Offsets computed from a record tile a unit file: aligned, disjoint, complete, hardly padded."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.checkpoint.digests import checksums, checksums_of, granule_digest
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    PartRecord,
    block_bytes,
    block_offsets,
    granule_bytes,
    granule_keys,
    granule_offset,
    granule_parts,
    payload_bytes,
    plan_units,
    stride,
    uncovered_parts,
    unit_record,
)
from firstlight.models.spec import read_model_spec
from tiny_checkpoints import FAMILIES, tiny_config

DTYPES = st.sampled_from(["F32", "BF16", "F16"])


def planned(config, dtype="F32"):
    spec = read_model_spec(config)
    parts = [
        (rule, PartRecord(rule.name, (rule.source,), dtype, dtype, rule.shape, rule.dim))
        for rule in spec.tensors
    ]
    return plan_units(parts, spec.facts)


@st.composite
def blocks(draw):
    granules = draw(st.integers(1, 12))
    ragged = draw(st.booleans())
    parts = []
    for number in range(draw(st.integers(1, 3))):
        dim = 0 if ragged else draw(st.integers(0, 1))
        length = granules * draw(st.integers(1, 9))
        if ragged:
            length = granules * 64 - draw(st.integers(0, 63))
        shape = [draw(st.integers(1, 7)), draw(st.integers(1, 7))]
        shape[dim] = length
        dtype = draw(DTYPES)
        parts.append(PartRecord(f"p{number}", ("s",), dtype, dtype, tuple(shape), dim))
    if ragged:  # all parts of a ragged block are equally long
        parts = parts[:1]
    experts = () if ragged else tuple(range(draw(st.integers(0, 3))))
    named = tuple(
        PartRecord(p.name, ("s",) * max(1, len(experts)), p.dtype, p.dtype, p.shape, p.dim)
        for p in parts
    )
    return BlockRecord("axis", granules, named, experts, 64 if ragged else 0)


@settings(max_examples=150, deadline=None)
@given(st.lists(blocks(), min_size=1, max_size=4))
def test_granules_are_disjoint_aligned_and_fill_the_file(parts):
    unit = unit_record("u", parts)
    at = 0
    for key in granule_keys(unit):
        block = unit.blocks[key.block]
        offset = granule_offset(unit, key)
        assert offset >= at and offset % 64 == 0
        assert offset - at < unit.alignment or key.granule
        at = offset + granule_bytes(block, key.granule)
        inner = 0
        for place in granule_parts(block, key.granule):
            assert place.offset >= inner and place.offset % 64 == 0
            inner = place.offset + place.num_bytes
        assert inner <= granule_bytes(block, key.granule) <= stride(block)
    assert at == unit.size
    assert uncovered_parts(unit) == []


@given(blocks())
def test_every_block_starts_on_its_alignment(block):
    unit = unit_record("u", [block, block, block])
    assert all(offset % unit.alignment == 0 for offset in block_offsets(unit))
    assert block_offsets(unit)[1] >= block_bytes(block)


def test_a_part_its_granules_do_not_hold_is_named():
    part = PartRecord("short", ("s",), "F32", "F32", (10, 4))
    assert uncovered_parts(unit_record("u", [BlockRecord("axis", 3, (part,))])) == ["short"]


@pytest.mark.parametrize("family", FAMILIES)
def test_units_follow_load_order_and_cover_the_model(family):
    units = planned(tiny_config(family))
    assert [u.name for u in units] == ["embed", "layer-000", "layer-001", "head"]
    spec = read_model_spec(tiny_config(family))
    stored = [p.name for u in units for b in u.blocks for p in b.parts]
    assert sorted(stored) == sorted(rule.name for rule in spec.tensors)
    assert all(uncovered_parts(unit) == [] for unit in units)


@pytest.mark.parametrize("hidden", [512, 576, 1024, 4096])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_padding_is_under_one_percent_of_large_units(hidden, dtype):
    config = tiny_config(
        hidden_size=hidden, intermediate_size=hidden * 8 // 3, vocab_size=32_001,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
    )  # fmt: skip
    for unit in planned(config, dtype):
        if unit.size > 2**20:
            assert unit.size - payload_bytes(unit) < 0.01 * unit.size


def test_the_published_expert_layout_needs_no_padding():
    """One expert in MXFP4 with groups of 32: 96 granules of 182,784 bytes, 4,284 pages."""
    codes, scales, wide, deep = 16, 1, 3072, 3584
    parts = []
    for name in ("w1", "w3"):
        parts.append(PartRecord(name, ("s",), "U8", "U8", (wide, deep // 32 * codes)))
        parts.append(PartRecord(f"{name}.s", ("s",), "U8", "U8", (wide, deep // 32 * scales)))
    parts.append(PartRecord("w2", ("s",), "U8", "U8", (deep, wide // 32 * codes), 1))
    parts.append(PartRecord("w2.s", ("s",), "U8", "U8", (deep, wide // 32 * scales), 1))
    block = BlockRecord("width", 96, tuple(parts), (0,))
    assert stride(block) == 182_784
    assert block_bytes(block) == 4_284 * 4096


@given(st.binary(min_size=1, max_size=400), st.integers(0, 20), st.integers(0, 20))
def test_checksums_of_tiles_add_up(data, first, second):
    padded = data + bytes(-len(data) % 8)
    cuts = sorted({0, min(first * 8, len(padded)), min(second * 8, len(padded)), len(padded)})
    rows = np.frombuffer(padded, np.uint8)
    total = 0
    for start, stop in pairwise(cuts):
        total += int(checksums(rows[start:stop].reshape(1, -1), start)[0])
    assert total % 2**64 == checksums_of(memoryview(data))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_changes_digest_and_checksum(data, draw):
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    key = GranuleKey(0, 0, 0)
    assert checksums_of(memoryview(data)) != checksums_of(memoryview(changed))
    assert granule_digest(memoryview(data), "u", key) != granule_digest(
        memoryview(changed), "u", key
    )


def test_the_same_bytes_elsewhere_have_another_digest():
    data = memoryview(bytes(64))
    places = [("u", GranuleKey(0, 0, 0)), ("v", GranuleKey(0, 0, 0)), ("u", GranuleKey(0, 0, 1))]
    assert len({granule_digest(data, *place) for place in places}) == 3
