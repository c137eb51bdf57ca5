"""Owns the opening of a checkpoint as published, a folder or one file; knows no model family.

Nothing is unpickled, ever. Every defect the headers show is found before a value is read.
"""

import threading
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3

from firstlight.checkpoint.findings import ERROR, NOTE, WARNING, Finding, refuse_errors
from firstlight.checkpoint.gguf import GgufCheckpoint
from firstlight.checkpoint.json_file import read_index, read_json
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.safetensors_header import Header, read_header
from firstlight.checkpoint.tensor_info import RAW_TYPES, Array, Checkpoint, TensorInfo
from firstlight.errors import BadInput, ConfigError, TensorError
from firstlight.units import format_count

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """Safetensors files, one or many, seen as one mapping of names to tensors."""

    format = "safetensors"

    def __init__(
        self,
        path: Path,
        *,
        headers: Mapping[Path, Header],
        findings: Iterable[Finding],
    ) -> None:
        self.path = path
        self.files = tuple(headers)
        found = list(findings)
        tensors: dict[str, TensorInfo] = {}
        for header in headers.values():
            found.extend(header.findings)
            for tensor in header.tensors:
                if tensor.name in tensors:
                    other = tensors[tensor.name].file.name
                    what = f"this tensor is also in {other}; which one counts is not known"
                    found.append(Finding(ERROR, f"{tensor.file}, {tensor.name}", what))
                tensors[tensor.name] = tensor
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.findings = tuple(found)
        self._headers = headers
        self._files: dict[Path, InputFile] = {}
        self._lock = threading.Lock()

    def config(self) -> dict[str, Any]:
        """Returns config.json. Raises ConfigError when the folder has none."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return read_json(folder / "config.json", ConfigError)

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Returns a tensor, or the rows [start, stop) of it, as a new array."""
        info = self.tensors[name]
        start, stop, _ = (rows or slice(None)).indices(info.rows)
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        values: Array = np.empty(shape, RAW_TYPES[info.dtype])
        self.read_into(name, start, values.reshape(-1).view(np.uint8).data)
        return values

    def read_into(self, name: str, start_row: int, buffer: memoryview) -> None:
        """Fills a byte buffer with whole rows from `start_row` on."""
        info = self.tensors[name]
        row_bytes = info.num_bytes // max(1, info.rows)
        self._open(info.file).read_into(buffer, info.offset + start_row * row_bytes)

    def source_digest(self) -> str:
        """Returns a BLAKE3 over file names, sizes and headers."""
        hasher = blake3()
        for path, header in sorted(self._headers.items()):
            hasher.update(f"{path.name}\0{header.size}\0{header.digest}\n".encode())
        return hasher.hexdigest()

    def close(self) -> None:
        """Closes the files; they are opened again by the next read."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open(self, path: Path) -> InputFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = InputFile(path)
            return self._files[path]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint folder, a .safetensors or a .gguf file.

    Raises TensorError listing every defect that the headers show.
    """
    checkpoint = scan_checkpoint(path)
    refuse_errors(checkpoint.findings, str(path))
    return checkpoint


def scan_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint however damaged, its defects in `findings`; for `inspect`.

    Raises TensorError when there is nothing at `path` that could be read as a checkpoint.
    """
    if not path.exists():
        raise TensorError(f"{path}: no such file or directory")
    if path.is_file():
        return _open_file(path)
    index = path / INDEX_NAME
    if index.exists():
        return _open_index(path, index)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return SafetensorsCheckpoint(path, headers={files[0]: read_header(files[0])}, findings=())
    if files:
        names = ", ".join(f.name for f in files[:8])
        raise TensorError(
            f"{path}: {len(files)} safetensors files ({names}) and no {INDEX_NAME} to say which "
            "belong to the model; add the index or name one file"
        )
    return _open_other(path)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.name.endswith(".index.json"):
        return _open_index(path.parent, path)
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path, headers={path: read_header(path)}, findings=())
    raise TensorError(f"{path}: not a .safetensors or .gguf file. {_PICKLE}")


_PICKLE = "Pickled weights (.bin, .pt, .pth) are not read: unpickling runs code from the file"


def _open_other(path: Path) -> Checkpoint:
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return GgufCheckpoint(gguf[0])
    if gguf:
        raise TensorError(f"{path}: {len(gguf)} GGUF files; name the one to read")
    if not path.is_dir():
        raise TensorError(f"{path}: neither a folder nor a .safetensors or .gguf file")
    pickled = [f.name for f in sorted(path.iterdir()) if f.suffix in (".bin", ".pt", ".pth")]
    hint = f" {_PICKLE}; found {', '.join(pickled[:8])}" if pickled else ""
    raise TensorError(f"{path}: holds no .safetensors and no .gguf file.{hint}")


def _open_index(folder: Path, index: Path) -> SafetensorsCheckpoint:
    fields = read_index(index)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorError(f"{index}: weight_map is missing or empty; copy the index again")
    findings: list[Finding] = []
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file if type(file) is str else "", set()).add(name)
    outside = [f for f in by_file if Path(f).name != f or f in ("", ".", "..")]
    for name in (name for file in outside for name in sorted(by_file.pop(file))):
        what = f"{weight_map[name]!r} is not a file name"
        findings.append(Finding(ERROR, f"{index}, {name}", what))
    headers: dict[Path, Header] = {}
    for file, names in sorted(by_file.items()):
        _add_shard(folder / file, names, headers, findings)
    findings.extend(_index_remarks(index, headers, set(by_file), fields.get("metadata")))
    return SafetensorsCheckpoint(folder, headers=headers, findings=findings)


def _add_shard(
    path: Path, names: set[str], headers: dict[Path, Header], findings: list[Finding]
) -> None:
    """Reads one file the index names and compares its tensors with the index."""
    if not path.is_file():
        listed = ", ".join(sorted(names)[:3])
        what = f"the index names this file for {len(names)} tensors ({listed} ...); it is absent"
        findings.append(Finding(ERROR, str(path), what, "download this file"))
        return
    try:
        header = headers[path] = read_header(path)
    except BadInput as error:
        findings.append(Finding(ERROR, str(path), str(error)))
        return
    present = {t.name for t in header.tensors}
    broken = {f.where for f in header.findings}
    if not present and header.findings:
        return  # the header as a whole is unreadable and reported as such
    for name in sorted(names - present):
        if f"{path}, {name}" not in broken:
            what = "the index places this tensor here, the file lacks it"
            findings.append(Finding(ERROR, f"{path}, {name}", what, "download this file"))
    for name in sorted(present - names):
        what = "the file holds this tensor, the index does not list it"
        findings.append(Finding(ERROR, f"{path}, {name}", what, "index and file do not match"))


def _index_remarks(
    index: Path, headers: Mapping[Path, Header], listed: set[str], metadata: object
) -> Iterable[Finding]:
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(t.num_bytes for h in headers.values() for t in h.tensors)
    if isinstance(stated, int) and stated != total:
        what = f"total_size says {format_count(stated)} bytes, the headers {format_count(total)}"
        yield Finding(WARNING, str(index), what)
    for path in sorted(index.parent.glob("*.safetensors")):
        if path.is_file() and path.name not in listed:
            yield Finding(NOTE, str(path), "not in the index, so not read")


def count_values(tensors: Iterable[TensorInfo]) -> int:
    """Returns the number of values of some tensors."""
    return sum(prod(t.shape) for t in tensors)
