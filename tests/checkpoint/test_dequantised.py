"""Checkpoints quantised as published are read as codes times scales, or refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.adapt.export import export_store
from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.shard import shard
from firstlight.assembly.source import open_source
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import parameter_shapes, targets_of
from firstlight.checkpoint.torch_types import as_tensor
from firstlight.errors import BadInput, ConfigError, TensorError
from firstlight.kernels.mxfp4 import from_mxfp4, to_mxfp4
from firstlight.sharding.layout import Layout
from tiny_checkpoints import write_checkpoint

SIZES = {
    "hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48,
}  # fmt: skip


def grouped(values, rows, columns):
    """Returns the largest magnitude of each block, spread over it, and one for each block."""
    padded = torch.nn.functional.pad(
        values.abs(), (0, -values.shape[1] % columns, 0, -values.shape[0] % rows)
    )
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    largest = blocks.amax((1, 3))
    spread = largest.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[: values.shape[0], : values.shape[1]], largest


def fp8(values, rows, columns, suffix="weight_scale"):
    spread, largest = grouped(values, rows, columns)
    codes = (values / (spread / 448)).to(torch.float8_e4m3fn)
    scales = largest / 448
    exact = codes.float() * (spread / 448)
    return {"weight": codes, suffix: scales}, exact


def fp8_tensor(values):
    parts, exact = fp8(values, *values.shape)
    parts["weight_scale"] = parts["weight_scale"].view(())
    return {**parts, "input_scale": torch.tensor(0.5)}, exact


def fp8_block(values):
    return fp8(values, 128, 128, "weight_scale_inv")


def int8(values):
    spread, largest = grouped(values, 1, values.shape[1])
    codes = (values / (spread / 127)).round().to(torch.int8)
    return {"weight": codes, "weight_scale": largest / 127}, codes.float() * (spread / 127)


def packed(codes, bits):
    """Packs codes as compressed-tensors does: the first in the lowest bits of an int32."""
    per = 32 // bits
    parts = (codes.long() + 2 ** (bits - 1)).view(codes.shape[0], -1, per)
    words = sum(parts[..., i] << (bits * i) for i in range(per))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int_packed(values, bits, group):
    _, largest = grouped(values, 1, group)
    top = 2 ** (bits - 1) - 1
    scales = (largest / top).bfloat16()
    steps = scales.float().repeat_interleave(group, 1)
    codes = (values / steps).round().clamp(-top - 1, top).to(torch.int8)
    shape = torch.tensor(values.shape)
    parts = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": shape}
    return parts, codes.float() * steps


def mxfp4(values):
    matrix = to_mxfp4(values)
    return {"weight_packed": matrix.packed, "weight_scale": matrix.scale}, from_mxfp4(matrix)


def compressed(kind, bits, form, **weights):
    group = {
        "targets": ["Linear"],
        "weights": {"type": kind, "num_bits": bits, "symmetric": True, **weights},
    }
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}


FORMS = {
    "fp8-tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "ct-fp8-channel": (lambda v: fp8(v, 1, v.shape[1]), compressed("float", 8, "float-quantized")),
    "ct-fp8-block": (
        lambda v: fp8(v, 128, 128),
        compressed("float", 8, "float-quantized", block_structure=[128, 128]),
    ),
    "ct-int8": (int8, compressed("int", 8, "int-quantized")),
    "ct-int8-packed": (lambda v: int_packed(v, 8, 32), compressed("int", 8, "pack-quantized")),
    "ct-int4-group": (lambda v: int_packed(v, 4, 32), compressed("int", 4, "pack-quantized")),
    "ct-int4-channel": (
        lambda v: int_packed(v, 4, v.shape[1]),
        compressed("int", 4, "pack-quantized"),
    ),
    "ct-mxfp4": (mxfp4, compressed("float", 4, "mxfp4-pack-quantized", group_size=32)),
}


def write_quantised(folder, form):
    """Writes a published checkpoint; returns the values its matrices stand for, in bf16."""
    quantise, config = FORMS[form]
    tensors = write_checkpoint(folder, torch_dtype="bfloat16", **SIZES)
    stored, exact = {}, {}
    for name, values in tensors.items():
        if "_proj.weight" in name:
            parts, whole = quantise(values)
            stored.update({f"{name.removesuffix('weight')}{k}": v for k, v in parts.items()})
            exact[name] = whole.bfloat16()
        else:
            stored[name] = exact[name] = values.bfloat16()
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return exact


@pytest.mark.parametrize("form", FORMS)
def test_a_published_checkpoint_loads_in_any_layout_and_through_a_store(tmp_path, form):
    exact = write_quantised(tmp_path / "hf", form)
    source = open_source(tmp_path / "hf")
    for layout in (Layout(), Layout(tp=2)):
        for rank in range(layout.world_size):
            place = layout.place(rank)
            shapes = parameter_shapes(source.spec, place)
            parameters = {n: torch.full(s, torch.nan) for n, s in shapes.items()}
            load_into(parameters, source.weights, source.spec, place)
            for target in targets_of(source.spec, place):
                part = target.part
                wanted = exact[target.rule.source].float()
                wanted = wanted.narrow(part.dim, part.start, part.stop - part.start)
                got = parameters[target.name].narrow(part.dim, 0, part.stop - part.start)
                assert torch.equal(got, wanted), (target.name, layout)
    shard(tmp_path / "hf", tmp_path / "store")
    export_store(tmp_path / "store", tmp_path / "back")
    back = open_source(tmp_path / "back").weights
    assert all(torch.equal(as_tensor(back.read(n), "BF16"), t) for n, t in exact.items())
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_inspect_says_how_it_is_quantised(tmp_path, form):
    write_quantised(tmp_path, form)
    report = inspect_path(tmp_path)
    assert report.sound, [f.line() for f in report.findings]
    assert any("values a scale" in kind for kind in report.bytes_by_dtype)
    assert report.num_bytes == sum(
        t.nbytes for n, t in load_file(tmp_path / "model.safetensors").items()
        if not n.endswith(("weight_shape", "input_scale"))
    )  # fmt: skip


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


FIRST = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("form", ["fp8-block", "ct-int8", "ct-int4-group"])
def test_a_scale_that_is_absent_or_does_not_fit_is_an_error(tmp_path, form):
    write_quantised(tmp_path, form)
    scale = f"{FIRST}.weight_scale" + ("_inv" if form == "fp8-block" else "")
    change(tmp_path, lambda t: t.update({scale: t[scale][:-1].contiguous()}))
    with pytest.raises(TensorError, match=rf"{FIRST}.*scales .* do not fit"):
        open_source(tmp_path)
    change(tmp_path, lambda t: t.pop(scale))
    with pytest.raises(TensorError, match=rf"{FIRST}.*holds codes, and 0 tensors"):
        open_source(tmp_path)
    with pytest.raises(TensorError, match=FIRST):
        shard(tmp_path, tmp_path.parent / "store")


def test_zero_points_are_refused(tmp_path):
    write_quantised(tmp_path, "ct-int4-group")
    zero = torch.zeros(2, dtype=torch.int32)
    change(tmp_path, lambda t: t.update({f"{FIRST}.weight_zero_point": zero}))
    with pytest.raises(TensorError, match="zero points"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        compressed("int", 3, "pack-quantized"),
        compressed("int", 4, "pack-quantized", symmetric=False),
        compressed("int", 4, "pack-quantized", actorder="group"),
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(tmp_path, config):
    write_checkpoint(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(ConfigError, match="quantization_config"):
        open_source(tmp_path)
    assert not inspect_path(tmp_path).sound
    with pytest.raises(BadInput):
        shard(tmp_path, tmp_path.parent / "refused")
