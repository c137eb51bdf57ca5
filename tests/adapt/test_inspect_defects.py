"""Every way a folder of weights can be wrong is a finding that names file and tensor."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.adapt.inspect import inspect_path
from firstlight.checkpoint.json_file import parse_index
from firstlight.errors import TensorError
from tiny_checkpoints import write_checkpoint

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path, shards=3)
    (tmp_path / "LICENSE").write_text("text")
    assert inspect_path(tmp_path).findings == ()
    return tmp_path


def errors(folder: Path) -> str:
    report = inspect_path(folder)
    lines = [f.line() for f in report.findings if f.severity == "error"]
    assert not report.sound and lines
    return "\n".join(lines)


def header_of(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(path: Path, header: object, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_an_absent_file_is_named_with_its_number_of_tensors(folder):
    count = len(load_file(folder / SECOND))
    (folder / SECOND).unlink()
    assert f"{SECOND}: the index names this file for {count} tensors" in errors(folder)


def test_a_short_file_names_the_tensors_that_end_beyond_it(folder):
    header, data = header_of(folder / SECOND)
    rewrite(folder / SECOND, header, data[:-4])
    last = max(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1]
    )
    text = errors(folder)
    assert f"{SECOND}, {last}: file is truncated" in text and text.count("truncated") == 1


def test_a_longer_file_is_named(folder):
    with (folder / SECOND).open("ab") as file:
        file.write(b"more")
    assert f"{SECOND}: 4 bytes after the last tensor that no tensor owns" in errors(folder)


@pytest.mark.parametrize("length", [100_000_001, 2**63])
def test_a_header_over_the_limit_is_named_and_not_read(folder, length):
    with (folder / SECOND).open("r+b") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(150_000_000)
    assert f"{SECOND}: header length" in errors(folder)


def test_a_header_close_to_the_limit_is_read(tmp_path):
    write_checkpoint(tmp_path)
    header, data = header_of(tmp_path / "model.safetensors")
    raw = json.dumps(header).encode()
    rewrite(tmp_path / "model.safetensors", raw + b" " * (100_000_000 - len(raw)), data)
    assert inspect_path(tmp_path).sound


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff{}", b'{"a": 1}', b'{"a": {"dtype": "F32"}}'])
def test_a_bad_header_is_named_once_and_not_each_of_its_tensors(folder, raw):
    rewrite(folder / SECOND, raw, b"")
    found = [
        f for f in inspect_path(folder).findings if SECOND in f.where and f.severity == "error"
    ]
    assert found
    if raw in (b"{", b"[]", b"\xff{}"):
        assert len(found) == 1


@pytest.mark.parametrize(
    ("shift", "words"), [(-4, "4 bytes shared between"), (4, "4 unused bytes between")]
)
def test_overlaps_and_gaps_name_both_tensors(folder, shift, words):
    header, data = header_of(folder / SECOND)
    names = sorted(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][0]
    )
    for name in names[1:]:
        header[name]["data_offsets"] = [at + shift for at in header[name]["data_offsets"]]
    rewrite(folder / SECOND, header, data[:shift] if shift < 0 else data + bytes(shift))
    text = errors(folder)
    assert f"{SECOND}, {names[1]}: {words} {names[0]}" in text


def test_a_name_twice_in_a_header_in_two_files_and_in_the_index(folder):
    header, data = header_of(folder / SECOND)
    name = next(n for n in header if n != "__metadata__")
    entry = json.dumps(header[name])
    text = json.dumps(header)[:-1] + f', "{name}": {entry}}}'
    rewrite(folder / SECOND, text.encode(), data)
    assert f"{SECOND}, {name}: name occurs twice in the header" in errors(folder)

    rewrite(folder / SECOND, header, data)
    save_file({**load_file(folder / THIRD), name: load_file(folder / SECOND)[name]}, folder / THIRD)
    assert f"{name}: this tensor is also in {SECOND}" in errors(folder)

    index = (folder / INDEX).read_text()
    (folder / INDEX).write_text(index.rstrip()[:-2] + f', "{name}": "{SECOND}"}}}}')
    with pytest.raises(TensorError, match=f"duplicate names: {name}"):
        inspect_path(folder)


def test_a_tensor_no_rule_uses_is_unexpected_and_a_missing_one_is_named(folder):
    tensors = load_file(folder / FIRST)
    name = next(iter(tensors))
    tensors["model.layers.0.surprise.weight"] = tensors.pop(name)
    save_file(tensors, folder / FIRST)

    def rename(index):
        del index["weight_map"][name]
        index["weight_map"]["model.layers.0.surprise.weight"] = FIRST

    change_index(folder, rename)
    text = errors(folder)
    assert f"{FIRST}, model.layers.0.surprise.weight: unexpected" in text
    assert f"{name}: missing: the model needs it for" in text


def test_what_only_the_file_or_only_the_index_holds_is_unmapped(folder):
    def change(index):
        index["weight_map"]["model.ghost.weight"] = index["weight_map"].pop(NORM)

    change_index(folder, change)
    text = errors(folder)
    assert f"{NORM}: the file holds this tensor, the index does not list it" in text
    assert "model.ghost.weight: the index places this tensor here, the file lacks it" in text


def test_shapes_and_types_that_the_config_does_not_say(folder):
    tensors = load_file(folder / FIRST)
    (one, value), (other, values) = list(tensors.items())[:2]
    tensors[one] = value[:-1].clone()
    tensors[other] = values.to(torch.int32)
    save_file(tensors, folder / FIRST)
    text = errors(folder)
    assert f"{FIRST}, {one}: shape" in text
    assert f"{FIRST}, {other}: I32 values where floating point ones are expected" in text


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (b'{"weight_map": {"a": "f", "b": "f"}, "metadata": {"n": 1, "w": ["x"]}}', 2),
        (b'{"weight_map": {"a\\u0062": "f"}}', 1),
        (b'{"weight_map": {}}', 0),
    ],
)
def test_the_quick_way_reads_what_the_careful_way_reads(raw, fields):
    parsed = parse_index(raw, Path("index.json"))
    assert parsed == json.loads(raw) and len(parsed["weight_map"]) == fields


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"a": {"b": 1, "b": 1}}', b'{"a": 1, "\\u0061": 2}'])
def test_an_index_that_is_none_or_repeats_names_is_refused(raw):
    with pytest.raises(TensorError, match=r"index\.json"):
        parse_index(raw, Path("index.json"))
