"""Owns the reading of torch's own files (.bin, .pt, .pth) as headers; runs nothing they hold.

Such a file is a zip without compression: `data.pkl` says what the tensors are, `data/N` are their
values, which lie in the file as they are. Knows no index and no model.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from blake3 import blake3

from firstlight.checkpoint.findings import ERROR, Finding
from firstlight.checkpoint.inert_pickle import Record, read_inert
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.safetensors_header import Header
from firstlight.checkpoint.tensor_info import TensorInfo
from firstlight.errors import TensorError
from firstlight.sharding.codecs import dtype_bytes
from firstlight.units import format_count

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
        "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
        "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    }
)  # fmt: skip
_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16",
        "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32",
        "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    }
)  # fmt: skip
KNOWN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "torch._utils _rebuild_tensor_v2": "tensor",
        "torch._utils _rebuild_tensor_v3": "tensor",
        "torch._utils _rebuild_parameter": "parameter",
        "torch.nn.parameter Parameter": "parameter",
        "collections OrderedDict": "dict",
        "torch Size": "size",
        "torch.storage UntypedStorage": "storage:",
        "torch.serialization _get_layout": "layout",
        **{f"torch {name}": f"storage:{name}" for name in (*_STORAGES, "UntypedStorage")},
        **{f"torch {name}": f"dtype:{name}" for name in DTYPES},
    }
)
_HOLDERS = ("state_dict", "model", "module")
_LOCAL_HEADER_BYTES = 30
_COPY = "copy this file again, or save the weights as safetensors"


class StoredTensor(NamedTuple):
    """One tensor of a zip: `offset` is that of its first value in the file, `whole` says that its
    values lie there row by row."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    whole: bool


def read_torch_header(path: Path) -> Header:
    """Returns what a file says of its tensors, with every defect found in it; reads no values."""
    file = InputFile(path)
    try:
        size = file.size()
        try:
            window = _Window(file, 0, size)
            raw, content = _read_zip(window, str(path))
            entries = dict(_tensors(content, window, str(path)))
        except TensorError as error:
            return Header((), (Finding(ERROR, str(path), str(error), _COPY),), "", size)
    finally:
        file.close()
    tensors, findings = [], []
    for name, stored in entries.items():
        num_bytes = prod(stored.shape) * dtype_bytes(stored.dtype)
        where = f"{path}, {name}"
        if not stored.whole:
            what = "its values do not lie row by row in the file (a transposed view)"
            findings.append(Finding(ERROR, where, what, "save it again after .contiguous()"))
            continue
        tensors.append(
            TensorInfo(
                name, stored.dtype, stored.shape, path, stored.offset, num_bytes, stored.dtype
            )
        )
    return Header(tuple(tensors), tuple(findings), blake3(raw).hexdigest(), size)


def read_torch_tensor(file: InputFile, offset: int, length: int) -> StoredTensor:
    """Returns the one tensor that a zip of `length` bytes at `offset` of a file holds.

    Raises TensorError when it holds anything else.
    """
    where = f"{file.path} at byte {format_count(offset)}"
    window = _Window(file, offset, length)
    _, content = _read_zip(window, where)
    found = _as_tensor(content, window, where)
    if found is None:
        raise TensorError(f"{where}: holds no tensor")
    return found


class _Window(io.RawIOBase):
    """A run of a file as a file, for the reader of zips, and where its stored members begin."""

    def __init__(self, file: InputFile, start: int, size: int) -> None:
        super().__init__()
        if start < 0 or start + size > file.size():
            raise TensorError(
                f"{file.path}: {format_count(size)} bytes at {format_count(start)} are beyond its "
                f"end at {format_count(file.size())}"
            )
        self._file, self._start, self._size, self._at = file, start, size, 0
        self.members: dict[str, tuple[int, int]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        self._file.read_into(view[:count], self._start + self._at)
        self._at += count
        return count

    def add_members(self, archive: zipfile.ZipFile, where: str) -> None:
        """Notes where the values of each member begin in the file, and their bytes."""
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise TensorError(f"{where}: {member.filename} is compressed; torch writes none so")
            self.seek(member.header_offset)
            head = self.read(_LOCAL_HEADER_BYTES)
            if head is None or len(head) < _LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04":
                raise TensorError(f"{where}: {member.filename} has no header where it should")
            names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            begin = member.header_offset + _LOCAL_HEADER_BYTES + names
            if begin + member.file_size > self._size:
                raise TensorError(f"{where}: is truncated inside {member.filename}")
            name = member.filename.partition("/")[2]
            self.members[name] = (self._start + begin, member.file_size)

    def member(self, name: str) -> bytes:
        """Returns the bytes of a small member."""
        offset, size = self.members[name]
        return bytes(self._file.read(offset, size))


def _read_zip(window: _Window, where: str) -> tuple[bytes, Any]:
    """Returns the bytes of `data.pkl` and what it says."""
    try:
        with zipfile.ZipFile(io.BufferedReader(window)) as archive:
            window.add_members(archive, where)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise TensorError(
            f"{where}: not a zip as torch writes since 1.6, or cut short: {error}"
        ) from error
    if "data.pkl" not in window.members:
        raise TensorError(f"{where}: holds no data.pkl, so torch did not write it")
    if "byteorder" in window.members and window.member("byteorder") != b"little":
        raise TensorError(f"{where}: was written by a big-endian machine")
    raw = window.member("data.pkl")
    return raw, read_inert(raw, where, KNOWN_NAMES)


def _tensors(content: Any, window: _Window, where: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the named tensors of a state dict; one inside `model` or the like is found there."""
    if not isinstance(content, dict):
        raise TensorError(f"{where}: holds no dictionary of tensors")
    inner = [content[name] for name in _HOLDERS if isinstance(content.get(name), dict)]
    found = 0
    for name, value in (inner[0] if len(inner) == 1 else content).items():
        stored = _as_tensor(value, window, f"{where}, {name}")
        if stored is not None and isinstance(name, str):
            found += 1
            yield name, stored
    if not found:
        raise TensorError(f"{where}: holds no tensor")


def _as_tensor(value: Any, window: _Window, where: str) -> StoredTensor | None:
    """Returns what a record says of a tensor, None when it is none."""
    if isinstance(value, Record) and value.name == "parameter" and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, Record) or value.name != "tensor":
        return None
    try:
        storage, first, shape, strides = value.arguments[:4]
        kind, key = storage.arguments[1].name.removeprefix("storage:"), storage.arguments[2]
        dtype = _STORAGES.get(kind, "")
        for extra in value.arguments[4:]:
            name = getattr(extra, "name", "") or getattr(extra, "__name__", "")
            if isinstance(extra, type) and name.startswith("dtype:"):
                dtype = DTYPES[name.removeprefix("dtype:")]
        offset, size = window.members[f"data/{key}"]
        shape, strides = tuple(shape), tuple(strides)
        width = dtype_bytes(dtype)
        begin = first * width
        end = begin + (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * width
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TensorError(f"{where}: is not described as torch does: {error}") from error
    if min((*shape, *strides, first), default=0) < 0 or (prod(shape) and end > size):
        raise TensorError(f"{where}: reaches beyond its storage of {format_count(size)} bytes")
    return StoredTensor(dtype, shape, offset + begin, _is_contiguous(shape, strides))


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return not prod(shape)
        step *= length
    return True
