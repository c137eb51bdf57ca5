"""Inspect says what a checkpoint holds from headers alone, and lists every defect."""

import json
import struct

import pytest

from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.shard import shard
from firstlight.errors import BadInput
from tiny_checkpoints import write_checkpoint


def test_facts_of_a_sound_checkpoint(tmp_path):
    tensors = write_checkpoint(tmp_path, "llama", shards=2)
    (tmp_path / "LICENSE").write_text("text")
    report = inspect_path(tmp_path)
    assert report.sound
    assert (report.family, report.model_type, report.num_layers) == ("llama", "llama", 2)
    assert report.parameters == sum(t.numel() for t in tensors.values())
    assert sum(report.parameters_by_part.values()) == report.parameters
    assert set(report.parameters_by_part) == {"embed", "attention", "mlp", "norms", "head"}
    assert report.num_tensors == len(tensors) and report.num_files == 2
    assert report.bytes_by_dtype == {"F32": sum(t.nbytes for t in tensors.values())}
    assert report.tensors_per_layer == {9: 2}
    assert report.licence == "see LICENSE"
    assert report.legal_tp == (1, 2)


def test_a_store_is_described_like_its_source(tmp_path):
    write_checkpoint(tmp_path / "hf", "qwen2")
    shard(tmp_path / "hf", tmp_path / "store")
    source, store = inspect_path(tmp_path / "hf"), inspect_path(tmp_path / "store")
    assert store.format == "store" and store.sound
    for name in ("parameters_by_part", "bytes_by_dtype", "num_tensors", "legal_tp", "model_type"):
        assert getattr(store, name) == getattr(source, name), name


def test_the_real_gguf_is_described(smollm2_gguf):
    report = inspect_path(smollm2_gguf)
    assert report.sound and report.parameters == 134_515_008 and report.tied
    assert report.quantisation == "Q4_1, Q8_0"
    assert report.tensors_by_dtype == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert report.licence == "apache-2.0"


def test_defects_of_files_names_and_config_come_together(tmp_path):
    write_checkpoint(tmp_path, shards=3)
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    report = inspect_path(tmp_path)
    text = "\n".join(f.line() for f in report.findings)
    assert not report.sound
    assert "model-00002-of-00003.safetensors, " in text and "truncated" in text
    assert "model-00003-of-00003.safetensors: the index names this file" in text
    assert "missing: the model needs it for" in text
    assert "states no licence" in text


def test_an_unknown_config_field_is_a_finding_and_headers_are_still_told(tmp_path):
    tensors = write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "new_trick": 1}))
    report = inspect_path(tmp_path)
    assert any("new_trick" in f.what for f in report.findings)
    assert report.num_tensors == len(tensors) and report.parameters == 0


def test_half_a_million_names_are_read_in_seconds(tmp_path):
    """One header of 497,220 tensors, the size of the largest index to be served."""
    header = {
        f"model.layers.{n % 93}.experts.{n}.w": {
            "dtype": "U8", "shape": [0], "data_offsets": [0, 0]
        }
        for n in range(497_220)
    }  # fmt: skip
    raw = json.dumps(header).encode()
    assert len(raw) < 100_000_000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    report = inspect_path(tmp_path)
    assert report.num_tensors == 497_220


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(BadInput):
        inspect_path(tmp_path / "absent")
    with pytest.raises(BadInput):
        inspect_path(tmp_path)
