"""A checkpoint folder is read exactly, and every defect its headers show is named."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from firstlight.checkpoint.reader import open_checkpoint, scan_checkpoint
from firstlight.errors import TensorError
from tiny_checkpoints import write_checkpoint


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(begin: int, end: int, *, dtype: str = "F32", shape: list[int] | None = None) -> dict:
    return {"dtype": dtype, "shape": shape or [(end - begin) // 4], "data_offsets": [begin, end]}


def defects(path: Path) -> str:
    with pytest.raises(TensorError) as caught:
        open_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_reads_back_bit_for_bit(tmp_path, shards):
    tensors = write_checkpoint(tmp_path, shards=shards, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        assert checkpoint.tensors[name].dtype == "BF16"
        assert np.array_equal(checkpoint.read(name), expected.view(torch.uint16).numpy())


def test_a_run_of_rows_is_that_run(tmp_path):
    tensors = write_checkpoint(tmp_path)
    rows = open_checkpoint(tmp_path).read("lm_head.weight", slice(7, 90))
    assert np.array_equal(rows, tensors["lm_head.weight"][7:90].numpy())


def test_scalars_and_empty_tensors_read(tmp_path):
    save_file({"s": torch.tensor(2.5), "e": torch.zeros(0, 3)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("s") == 2.5
    assert checkpoint.read("e").shape == (0, 3)


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(min_value=1, max_value=100_000))
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    write_checkpoint(folder, shards=2)
    victim = folder / "model-00002-of-00002.safetensors"
    raw = victim.read_bytes()
    victim.write_bytes(raw[: max(0, len(raw) - cut % len(raw) - 1)])
    assert victim.name in defects(folder)


def test_a_truncated_file_names_each_tensor_that_is_short(tmp_path):
    header = {"a": entry(0, 8), "b": entry(8, 16), "c": entry(16, 24)}
    text = defects(write_raw(tmp_path / "m.safetensors", header, bytes(12)))
    assert "2 defects" in text
    assert "m.safetensors, b" in text and "m.safetensors, c" in text
    assert "truncated" in text


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, ("b", "4 bytes shared")),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, ("b", "4 unused bytes")),
        ({"a": entry(4, 8)}, 8, ("a", "4 unused bytes")),
        ({"a": entry(0, 8)}, 9, ("1 bytes after the last tensor",)),
        ({"a": entry(0, 8, dtype="F7")}, 8, ("a", "unknown element type 'F7'")),
        ({"a": entry(0, 8, shape=[3])}, 8, ("a", "takes 12 bytes", "hold 8")),
        ({"a": entry(0, 8, shape=[-2, -1])}, 8, ("a", "shape [-2, -1]")),
        ({"a": entry(8, 0, shape=[0])}, 8, ("a", "not [begin, end]")),
        ({"a": {"dtype": "F32"}}, 0, ("a", "must hold dtype, shape and data_offsets")),
        ({"a": entry(0, 8), "b": 3}, 8, ("b", "must hold")),
        ([1], 0, ("JSON list, not an object",)),
        (b'{"a": ', 0, ("not valid JSON",)),
        (b"\xff\xfe", 0, ("not valid JSON",)),
        (b"[" * 100_000, 0, ("not valid JSON",)),
    ],
)
def test_each_broken_header_is_named(tmp_path, header, data, words):
    text = defects(write_raw(tmp_path / "m.safetensors", header, bytes(data)))
    for word in ("m.safetensors", *words):
        assert word in text


def test_a_name_twice_in_one_header_is_refused(tmp_path):
    one = json.dumps(entry(0, 8))
    raw = f'{{"w": {one}, "w": {one}}}'.encode()
    assert "m.safetensors, w: name occurs twice" in defects(
        write_raw(tmp_path / "m.safetensors", raw, bytes(8))
    )


def test_a_header_over_the_limit_is_refused_unread(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(200_000_000)
    assert "over the format's limit" in defects(path)


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 1000) + b"{}")
    assert "does not fit the file of 10" in defects(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_too_small_for_a_header_is_refused(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert f"holds {len(content)} bytes" in defects(path)


def test_an_index_alone_names_every_absent_file(tmp_path):
    write_checkpoint(tmp_path, shards=3)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    text = defects(tmp_path)
    assert "3 defects" in text
    assert all(f"model-0000{n}-of-00003.safetensors" in text for n in (1, 2, 3))


def test_index_and_files_are_compared_both_ways(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["model.ghost.weight"] = file
    path.write_text(json.dumps(index))
    text = defects(tmp_path)
    assert f"{file}, model.norm.weight: the file holds this tensor, the index does not" in text
    assert f"{file}, model.ghost.weight: the index places this tensor here" in text


def test_a_tensor_in_two_files_is_refused(tmp_path):
    tensors = write_checkpoint(tmp_path, shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    name = next(iter(tensors))
    save_file({**load_file(second), name: tensors[name]}, second)
    assert f"{name}: this tensor is also in model-00001-of-00002" in defects(tmp_path)


def test_an_index_may_not_reach_outside_its_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": {"a": "../secret.safetensors", "b": "/etc/passwd", "c": 3, "d": ["e"]}}
        )
    )
    text = defects(tmp_path)
    assert "4 defects" in text and text.count("is not a file name") == 4


def test_a_bin_that_torch_did_not_write_is_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin: not a zip as torch writes" in defects(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "a.txt"])
def test_a_path_with_nothing_to_read_is_refused(tmp_path, name):
    (tmp_path / "a.txt").write_text("x")
    assert name in defects(tmp_path / name)


def test_a_scan_returns_the_sound_part_beside_the_defects(tmp_path):
    tensors = write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    checkpoint = scan_checkpoint(tmp_path)
    assert len(checkpoint.findings) == 1
    assert 0 < len(checkpoint.tensors) < len(tensors)


def test_a_file_shortened_after_opening_is_an_error_not_zeros(tmp_path):
    write_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    last = max(checkpoint.tensors.values(), key=lambda t: t.offset)
    with pytest.raises(TensorError, match="the file ends at byte"):
        checkpoint.read(last.name)


def test_the_source_digest_follows_the_headers(tmp_path):
    write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b")
    write_checkpoint(tmp_path / "c", intermediate_size=64)
    one, same, other = (open_checkpoint(tmp_path / n).source_digest() for n in "abc")
    assert one == same != other
