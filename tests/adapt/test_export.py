"""Store to safetensors returns the source bit for bit where nothing was cast."""

import pytest
import torch
from safetensors.torch import load_file

from firstlight.adapt.export import export_store
from firstlight.adapt.shard import ShardOptions, shard
from firstlight.checkpoint.names import require_match
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.errors import DigestMismatch, EnvironmentProblem, StoreError
from firstlight.models.spec import read_model_spec
from tiny_checkpoints import FAMILIES, random_tensors, tiny_config, write_checkpoint, write_weights


def exported(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_round_trip_is_exact(tmp_path, family, dtype):
    tensors = write_checkpoint(tmp_path / "hf", family, dtype=dtype)
    shard(tmp_path / "hf", tmp_path / "store")
    report = export_store(tmp_path / "store", tmp_path / "out")
    back = exported(tmp_path / "out")
    assert set(back) == set(tensors) and report.tensors == len(tensors) and not report.cast
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


def test_an_export_opens_as_a_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store")
    export_store(tmp_path / "store", tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    require_match(checkpoint, read_model_spec(checkpoint.config()))


def test_nan_payloads_tied_twins_and_unused_tensors_survive(tmp_path):
    config = tiny_config("llama-tied")
    write_checkpoint(tmp_path / "hf", "llama-tied")
    tensors = random_tensors(read_model_spec(config))
    tensors["model.embed_tokens.weight"].view(torch.int32)[0, 0] = 0x7FC00123
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(3)
    write_weights(tmp_path / "hf", tensors)
    shard(tmp_path / "hf", tmp_path / "store")
    export_store(tmp_path / "store", tmp_path / "out")
    back = exported(tmp_path / "out")
    assert set(back) == set(tensors)
    assert all(same_bits(back[name], tensors[name]) for name in tensors)


def test_a_cast_is_said(tmp_path):
    tensors = write_checkpoint(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store", ShardOptions(dtype="bf16"))
    report = export_store(tmp_path / "store", tmp_path / "out")
    assert report.cast == ("F32 -> BF16",)
    back = exported(tmp_path / "out")
    assert all(same_bits(back[name], tensors[name].bfloat16()) for name in tensors)


def test_damage_is_not_exported(tmp_path):
    write_checkpoint(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store")
    path = tmp_path / "store/units/head.bin"
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DigestMismatch, match="unit head"):
        export_store(tmp_path / "store", tmp_path / "out")


def test_a_target_in_use_is_refused(tmp_path):
    write_checkpoint(tmp_path / "hf")
    shard(tmp_path / "hf", tmp_path / "store")
    with pytest.raises(StoreError, match="empty or new"):
        export_store(tmp_path / "store", tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises((StoreError, EnvironmentProblem)):
        export_store(tmp_path / "store", tmp_path / "file" / "below")
