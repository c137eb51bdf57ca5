"""Quantised stores give back the same values in any layout, as near as their codec promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.adapt.export import export_store
from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.quantise import encode, encode_granules
from firstlight.adapt.shard import ShardOptions, shard
from firstlight.adapt.verify import verify_store
from firstlight.checkpoint.codec_values import (
    decode_matrix,
    e4m3_values,
    float32_to,
    mxfp4_values,
)
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes, targets_of
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.store_layout import BlockRecord, PartRecord
from firstlight.checkpoint.torch_types import TORCH_TYPES, as_tensor
from firstlight.errors import LayoutError, TensorError
from firstlight.kernels.mxfp4 import Mxfp4, from_mxfp4
from firstlight.models.spec import read_model_spec
from firstlight.sharding.codecs import CODECS
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from tiny_checkpoints import tiny_config, write_checkpoint

QUANTISED = [codec for codec in CODECS.values() if codec.quantised]
NAMES = [codec.name for codec in QUANTISED]
# Largest error as a share of the largest magnitude of a group: half a step of the codes.
HALF_STEP = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 1 / 28, "fp8-block": 1 / 28, "mxfp4": 0.25}


def whole(codec, values):
    coded = encode(codec, values)
    raw = np.concatenate([t.contiguous().view(torch.uint8).numpy().reshape(-1) for t in coded])
    return torch.from_numpy(decode_matrix(codec, raw, tuple(values.shape)))


def test_codes_mean_what_torch_and_the_kernels_say():
    codes = torch.arange(256, dtype=torch.uint8)
    ours, torchs = e4m3_values(), codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(ours, torchs, equal_nan=True)
    packed = torch.randint(0, 256, (3, 32), dtype=torch.uint8)
    scale = torch.randint(100, 150, (3, 2), dtype=torch.uint8)
    raw = torch.cat((packed.reshape(-1), scale.reshape(-1))).numpy()
    ours = decode_matrix(CODECS["mxfp4"], raw, (3, 64))
    assert np.array_equal(ours, from_mxfp4(Mxfp4(packed, scale)).numpy())
    assert len(mxfp4_values()) == 16


@pytest.mark.parametrize("codec", QUANTISED, ids=NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_values_stray_by_half_a_step_at_most(codec, seed, scale):
    values = torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)) * scale
    back = whole(codec, values)
    rows, columns = codec.rows or 256, codec.columns or 128
    groups = (256 // rows, rows, 128 // columns, columns)
    largest = values.view(groups).abs().amax((1, 3), keepdim=True)
    error = (back - values).view(groups).abs()
    assert bool((error <= largest * HALF_STEP[codec.name] * 1.001).all())
    assert torch.equal(whole(codec, back), back) or codec.name in ("int4", "fp8", "fp8-block")


@pytest.mark.parametrize("codec", QUANTISED, ids=NAMES)
def test_zeros_stay_zeros_and_what_is_not_finite_is_refused(codec):
    assert not whole(codec, torch.zeros(128, 128)).any()
    for bad in (torch.inf, torch.nan):
        with pytest.raises(TensorError, match="not finite"):
            encode(codec, torch.full((128, 128), bad))


@pytest.mark.parametrize("codec", QUANTISED, ids=NAMES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("granules", [1, 2, 3])
def test_granules_hold_the_values_of_the_whole_matrix(codec, dim, granules):
    shape = (768, 256) if dim == 0 else (128, 768)
    values = torch.randn(shape)
    part = PartRecord("w", ("w",), "F32", "F32", shape, dim=dim, codec=codec.name)
    block = BlockRecord("width", granules, (part,))
    rows = encode_granules(block, part, values)
    cut = [n // granules if d == dim else n for d, n in enumerate(shape)]
    assert rows.shape == (granules, codec.matrix_bytes(cut))
    slabs = [decode_matrix(codec, row, tuple(cut)) for row in rows]
    assert np.array_equal(np.concatenate(slabs, axis=dim), whole(codec, values).numpy())


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=20))
def test_rounding_to_bf16_is_torchs(values):
    ours = as_tensor(float32_to(np.array(values, np.float32), "BF16"), "BF16")
    theirs = torch.tensor(values, dtype=torch.float32).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


WIDE = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def loaded(store, spec, place):
    kept, shapes = kept_types(spec), parameter_shapes(spec, place)
    parameters = {
        name: torch.full(shape, 7, dtype=TORCH_TYPES[kept[name]] if name in kept else torch.float32)
        for name, shape in shapes.items()
    }
    load_into(parameters, store, spec, place)
    return parameters


@pytest.mark.parametrize("dtype", NAMES)
def test_any_layout_loads_what_the_export_holds(tmp_path, dtype):
    tensors = write_checkpoint(tmp_path / "hf", dtype=torch.bfloat16, **WIDE)
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype=dtype))
    made = export_store(tmp_path / "store", tmp_path / "back")
    assert made.cast == (f"BF16 -> {dtype}",) and verify_store(tmp_path / "store").passed
    back = open_checkpoint(tmp_path / "back")
    spec = read_model_spec(tiny_config(**WIDE))
    codec, store = CODECS[dtype], open_store(tmp_path / "store")
    coded = {
        p.name for u in store.manifest.units for b in u.blocks for p in b.parts if p.codec == dtype
    }
    assert len(coded) == 14  # seven matrices of two layers; norms, embedding and head are kept
    for rule in spec.tensors:
        exact = tensors[rule.source]
        wanted = whole(codec, exact).bfloat16() if rule.name in coded else exact
        assert torch.equal(as_tensor(back.read(rule.source), "BF16"), wanted), rule.name
    for layout in (Layout(), Layout(tp=2), Layout(tp=2, pp=2)):
        for rank in range(layout.world_size):
            place = layout.place(rank)
            try:
                parameters = loaded(store, spec, place)
            except LayoutError as error:
                assert dtype == "fp8-block" and "legal degrees" in str(error)
                continue
            for target in targets_of(spec, place):
                exact = tensors[target.rule.source].float()
                values = whole(codec, exact) if target.name in coded else exact
                part, got = target.part, parameters[target.name]
                length = part.stop - part.start
                wanted = values.narrow(part.dim, part.start, length)
                assert torch.equal(got.narrow(part.dim, 0, length), wanted), target.name


@pytest.mark.parametrize("dtype", ["int8", "mxfp4"])
def test_a_quantised_store_is_smaller_and_inspect_says_how(tmp_path, dtype):
    write_checkpoint(tmp_path / "hf", dtype=torch.bfloat16, **WIDE)
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype=dtype))
    source, store = inspect_path(tmp_path / "hf"), inspect_path(tmp_path / "store")
    assert store.quantisation == dtype and store.sound
    assert set(store.bytes_by_dtype) == {dtype, "BF16"}
    assert store.num_bytes < source.num_bytes * CODECS[dtype].bits / 16 * 1.25
    assert store.parameters == source.parameters


@pytest.mark.parametrize("dtype", ["int8", "int4", "mxfp4"])
def test_kimi_experts_are_quantised_one_by_one(tmp_path, dtype):
    spec = write_layout_miniature(tmp_path / "hf", quantised=False)
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype=dtype))
    store, source = open_store(tmp_path / "store"), open_checkpoint(tmp_path / "hf")
    codec, checked = CODECS[dtype], 0
    place = Layout(tp=6, ep=2).place(4)
    parameters = loaded(store, spec, place)
    for target in targets_of(spec, place):
        if target.stacked is None:
            continue
        info = source.tensors[target.rule.source]
        values = whole(codec, as_tensor(source.read(info.name), info.dtype).float())
        part = target.part
        wanted = values.narrow(part.dim, part.start, part.stop - part.start)
        assert torch.equal(parameters[target.name][target.stacked], wanted), target.rule.source
        checked += 1
    assert checked
