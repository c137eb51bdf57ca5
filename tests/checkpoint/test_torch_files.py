"""Torch's own files are read bit for bit, and nothing inside them is ever run."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from firstlight.adapt.export import export_store
from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.shard import shard
from firstlight.checkpoint.reader import open_checkpoint, scan_checkpoint
from firstlight.checkpoint.torch_types import as_tensor
from firstlight.errors import TensorError
from tiny_checkpoints import write_checkpoint

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.uint16, torch.uint32,
]  # fmt: skip


def same(left, right):
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def values_of(checkpoint, name):
    return as_tensor(checkpoint.read(name), checkpoint.tensors[name].dtype)


def write_bins(folder: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    tensors = write_checkpoint(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    if shards == 1:
        torch.save(OrderedDict(tensors), folder / "pytorch_model.bin")
        return tensors
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-0000{number + 1}-of-0000{shards}.bin"
        torch.save({n: tensors[n] for n in names[number::shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[number::shards], file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_every_element_type_views_scalars_and_parameters_read_back(tmp_path):
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.zeros(0, 3)
    tensors["view"] = torch.arange(100.0)[10:22].view(3, 4)
    saved = {**tensors, "parameter": torch.nn.Parameter(torch.ones(2)), "step": 3, "text": "x"}
    torch.save(saved, tmp_path / "m.bin")
    checkpoint = open_checkpoint(tmp_path / "m.bin")
    assert checkpoint.format == "pytorch" and set(checkpoint.tensors) == {*tensors, "parameter"}
    assert all(same(values_of(checkpoint, name), tensors[name]) for name in tensors)
    rows = checkpoint.read("view", slice(1, 3))
    assert np.array_equal(rows, tensors["view"][1:].numpy())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_bins_becomes_the_same_store_as_safetensors(tmp_path, shards):
    tensors = write_bins(tmp_path / "bins", shards)
    (tmp_path / "bins" / "training_args.bin").write_bytes(b"anything")
    report = inspect_path(tmp_path / "bins")
    assert report.sound and report.format == "pytorch" and report.num_files == shards
    shard(tmp_path / "bins", tmp_path / "store")
    export_store(tmp_path / "store", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert set(back.tensors) == set(tensors)
    assert all(same(values_of(back, name), tensors[name]) for name in tensors)


def test_a_state_dict_inside_a_training_state_is_found(tmp_path):
    torch.save({"model": {"a": torch.ones(2)}, "epoch": 1}, tmp_path / "m.pt")
    assert set(open_checkpoint(tmp_path / "m.pt").tensors) == {"a"}


class Malicious:
    """Unpickled by pickle itself, this makes a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["value", "key", "whole"])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path, place):
    bad = Malicious(tmp_path / "run")
    content = {"value": {"a": torch.ones(2), "b": bad}, "key": {bad: 1}, "whole": bad}[place]
    if place == "key":
        content = {"a": [("x", bad)]}
    torch.save(content, tmp_path / "m.bin")
    with pytest.raises(TensorError, match=r"m\.bin.*names posix\.mkdir"):
        open_checkpoint(tmp_path / "m.bin")
    assert not (tmp_path / "run").exists()
    with zipfile.ZipFile(tmp_path / "m.bin") as archive:
        pickled = archive.read("m/data.pkl")
    assert b"mkdir" in pickled  # it was there to be run


@pytest.mark.parametrize("name", ["eval", "exec", "getattr", "__import__"])
def test_builtins_are_out_of_reach(tmp_path, name):
    raw = b"\x80\x02cbuiltins\n" + name.encode() + b"\nX\x01\x00\x00\x001\x85R."
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
        archive.writestr("m/data.pkl", raw)
    with pytest.raises(TensorError, match=rf"names builtins\.{name}"):
        open_checkpoint(tmp_path / "m.bin")


def test_a_pickle_may_not_change_the_records_it_is_given(tmp_path):
    # BUILD with slot state on the class itself would set its attributes.
    raw = b"\x80\x02ctorch\nSize\nN}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86b."
    for _ in range(2):
        with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
            archive.writestr("m/data.pkl", raw)
        with pytest.raises(TensorError):
            open_checkpoint(tmp_path / "m.bin")
    torch.save({"a": torch.ones(2, 3)}, tmp_path / "good.bin")
    assert open_checkpoint(tmp_path / "good.bin").tensors["a"].shape == (2, 3)


def test_a_transposed_view_is_named_with_what_to_do(tmp_path):
    torch.save({"a": torch.ones(2, 3).t(), "b": torch.ones(2)}, tmp_path / "m.bin")
    with pytest.raises(TensorError, match=r"m\.bin, a: .*contiguous"):
        open_checkpoint(tmp_path / "m.bin")


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 0.999), flip=st.booleans(), at=st.floats(0, 0.999))
def test_damage_never_crashes_and_never_reaches_beyond_the_file(tmp_path_factory, share, flip, at):
    path = tmp_path_factory.mktemp("cut") / "m.bin"
    torch.save({"a": torch.arange(64.0).view(8, 8), "b": torch.ones(3)}, path)
    raw = bytearray(path.read_bytes())
    if flip:
        raw[int(at * len(raw))] ^= 0x41
    else:
        raw = raw[: int(share * len(raw))]
    path.write_bytes(raw)
    checkpoint = scan_checkpoint(path)
    assert flip or checkpoint.findings
    for info in checkpoint.tensors.values():
        assert info.offset + info.num_bytes <= len(raw)


def test_a_file_of_the_old_form_says_what_to_do(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(TensorError, match=r"since 1\.6"):
        open_checkpoint(tmp_path / "m.bin")


def save_distributed(folder, state):
    dcp.save(state, checkpoint_id=str(folder))


def test_a_distributed_checkpoint_becomes_a_store(tmp_path):
    tensors = write_checkpoint(tmp_path / "hf", dtype=torch.bfloat16)
    save_distributed(tmp_path / "dcp", {"model": tensors, "step": 3})
    (tmp_path / "dcp" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    report = inspect_path(tmp_path / "dcp")
    assert report.sound and report.format == "torch.distributed"
    shard(tmp_path / "dcp", tmp_path / "store")
    export_store(tmp_path / "store", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert set(back.tensors) == set(tensors)
    assert all(same(values_of(back, name), tensors[name]) for name in tensors)


def write_chunks(folder: Path, whole: torch.Tensor, boxes) -> None:
    """Writes one tensor as a run of several ranks would leave it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    chunks, places = [], {}
    for number, (first, shape) in enumerate(boxes):
        part = whole[tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))].clone()
        path = folder / f"__{number}_0.distcp"
        torch.save(part, path)
        chunks.append(ChunkStorageMetadata(torch.Size(first), torch.Size(shape)))
        index = MetadataIndex("w", torch.Size(first), number)
        places[index] = _StorageInfo(path.name, 0, path.stat().st_size)
    record = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    metadata = Metadata({"w": record, "n": BytesStorageMetadata()}, None, places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


BOXES = {
    "rows": [((0, 0), (3, 6)), ((3, 0), (4, 6))],
    "columns": [((0, 0), (7, 2)), ((0, 2), (7, 4))],
    "grid": [((0, 0), (3, 2)), ((0, 2), (3, 4)), ((3, 0), (4, 2)), ((3, 2), (4, 4))],
}


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
def test_chunks_of_many_ranks_are_put_together(tmp_path, boxes):
    whole = torch.randn(7, 6)
    write_chunks(tmp_path / "dcp", whole, boxes)
    checkpoint = open_checkpoint(tmp_path / "dcp")
    assert np.array_equal(checkpoint.read("w"), whole.numpy())
    assert np.array_equal(checkpoint.read("w", slice(2, 5)), whole[2:5].numpy())


@pytest.mark.parametrize("boxes", [BOXES["grid"][:3], [*BOXES["rows"], ((2, 1), (2, 2))]])
def test_chunks_that_overlap_or_leave_holes_are_named(tmp_path, boxes):
    write_chunks(tmp_path / "dcp", torch.randn(7, 6), boxes)
    with pytest.raises(TensorError, match=r", w: its \d chunks do not make up \[7, 6\]"):
        open_checkpoint(tmp_path / "dcp")


def test_an_absent_or_short_chunk_file_is_named(tmp_path):
    write_chunks(tmp_path / "dcp", torch.randn(7, 6), BOXES["rows"])
    second = tmp_path / "dcp" / "__1_0.distcp"
    second.write_bytes(second.read_bytes()[:-9])
    with pytest.raises(TensorError, match=r"__1_0\.distcp: .* beyond its end"):
        open_checkpoint(tmp_path / "dcp")
    second.unlink()
    with pytest.raises(TensorError, match=r"__1_0\.distcp is absent"):
        open_checkpoint(tmp_path / "dcp")


def test_code_in_distributed_metadata_is_not_run(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "run")))
    with pytest.raises(TensorError, match=r"names posix\.mkdir"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "run").exists()
