"""Owns tensors that lie in files as they are, at offsets that headers name; parses no header."""

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3

from firstlight.checkpoint.findings import ERROR, Finding
from firstlight.checkpoint.json_file import read_json
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.safetensors_header import Header
from firstlight.checkpoint.tensor_info import RAW_TYPES, Array, TensorInfo
from firstlight.errors import ConfigError


class FileCheckpoint:
    """Files with headers, one or many, seen as one mapping of names to tensors."""

    def __init__(
        self,
        path: Path,
        *,
        kind: str,
        headers: Mapping[Path, Header],
        findings: Iterable[Finding],
    ) -> None:
        self.path = path
        self.format = kind
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
