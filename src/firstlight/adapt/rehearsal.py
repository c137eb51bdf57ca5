"""Owns rehearsal checkpoints: every file of a model at its full size, true headers and no values.

Data are holes that read as zeros, so that inspect, maps and plans run at real size on any disk.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from firstlight.adapt.indexed_model import IndexedModel
from firstlight.checkpoint.bare_index import BareIndex, read_bare_index
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.json_file import read_json
from firstlight.checkpoint.names import match_names
from firstlight.checkpoint.positioned_io import explained, refuse_occupied, write_whole
from firstlight.checkpoint.reader import INDEX_NAME
from firstlight.checkpoint.safetensors_header import encode_header, place_tensors
from firstlight.checkpoint.tensor_info import TensorInfo
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.codecs import dtype_bytes


@dataclass(frozen=True)
class RehearsalReport:
    """What was written: `num_bytes` as files say, `disk_bytes` as the disk holds."""

    path: Path
    files: int
    tensors: int
    num_bytes: int
    disk_bytes: int


def write_rehearsal(config: Path, target: Path) -> RehearsalReport:
    """Writes the checkpoint that a config.json (or the folder of one) describes, without values.

    An index beside the config says which tensor is in which file; without one each layer is a
    file. Raises StoreError for a target that is not empty, ConfigError and TensorError when config
    and index do not fit together.
    """
    folder = config if config.is_dir() else config.parent
    refuse_occupied(target)
    spec = read_model_spec(read_json(folder / "config.json"))
    index = read_bare_index(folder) or _one_file_a_unit(folder, spec)
    model = IndexedModel(folder, index)
    refuse_errors(match_names(model.tensors, spec).findings(), str(index.path))
    with explained(target, 0, "create"):
        target.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, list[TensorInfo]] = {}
    for info in model.tensors.values():
        by_file.setdefault(info.file.name, []).append(info)
    for name, infos in sorted(by_file.items()):
        _write_file(target / name, infos)
    total = sum(info.num_bytes for info in model.tensors.values())
    _write_index(target / INDEX_NAME, model.tensors, total)
    write_whole(target / "config.json", (folder / "config.json").read_bytes())
    sizes = [path.stat() for path in target.iterdir()]
    return RehearsalReport(
        path=target,
        files=len(by_file),
        tensors=len(model.tensors),
        num_bytes=sum(size.st_size for size in sizes),
        disk_bytes=sum(size.st_blocks * 512 for size in sizes),
    )


def _one_file_a_unit(folder: Path, spec: ModelSpec) -> BareIndex:
    units = list(dict.fromkeys(rule.unit for rule in spec.tensors))
    files = {
        unit: f"model-{number:05d}-of-{len(units):06d}.safetensors"
        for number, unit in enumerate(units, 1)
    }
    weight_map = {rule.source: files[rule.unit] for rule in spec.tensors}
    return BareIndex(folder / INDEX_NAME, weight_map, None)


def _write_file(path: Path, infos: Iterable[TensorInfo]) -> None:
    """Writes a header in the order of the format's own writer (wide types first), then a hole."""
    ordered = sorted(infos, key=lambda i: (-dtype_bytes(i.dtype), i.name))
    tensors = place_tensors((info.name, info.dtype, info.shape) for info in ordered)
    header, last = encode_header(tensors), tensors[-1]
    with explained(path, 0, "write", len(header)), path.open("wb") as file:
        file.write(header)
        os.truncate(file.fileno(), len(header) + last.offset + last.num_bytes)


def _write_index(path: Path, tensors: Mapping[str, TensorInfo], total: int) -> None:
    weight_map = {name: info.file.name for name, info in sorted(tensors.items())}
    fields = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_whole(path, json.dumps(fields, separators=(",", ":")).encode())
