"""Owns one safetensors header, read, checked or written; knows no index and reads no values.

Layout of a file: 8 bytes header length (little-endian), a JSON object, then the data without gaps.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from blake3 import blake3

from firstlight.checkpoint.findings import ERROR, Finding
from firstlight.checkpoint.json_file import duplicates
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.tensor_info import TensorInfo
from firstlight.sharding.codecs import DTYPE_BITS, tensor_bytes
from firstlight.units import format_count

LARGEST_HEADER = 100_000_000
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_COPY = "download or copy this file again"
_ALIGNMENT = 8  # of the data, by blanks after the header


class Header(NamedTuple):
    """What one file says: sound tensors, defects, a digest of its header bytes, its size."""

    tensors: tuple[TensorInfo, ...]
    findings: tuple[Finding, ...]
    digest: str
    size: int


class OutputTensor(NamedTuple):
    """One tensor of a file to be written: its place in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def place_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[OutputTensor]:
    """Returns where tensors (name, type, shape) stand that follow each other without gaps."""
    placed, offset = [], 0
    for name, dtype, shape in tensors:
        num_bytes = tensor_bytes(dtype, shape)
        placed.append(OutputTensor(name, dtype, shape, offset, num_bytes))
        offset += num_bytes
    return placed


def encode_header(tensors: Iterable[OutputTensor]) -> bytes:
    """Returns what a file of these tensors begins with: the header's length and the header."""
    entries = ['"__metadata__":{"format":"pt"}']
    for name, dtype, shape, begin, num_bytes in tensors:  # by hand: they may be half a million
        entries.append(
            f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
            f'"data_offsets":[{begin},{begin + num_bytes}]}}'
        )
    raw = f"{{{','.join(entries)}}}".encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def read_header(path: Path) -> Header:
    """Returns the header of a safetensors file with every defect found in it; reads no values."""
    file = InputFile(path)
    try:
        size = file.size()
        if size < 8:
            return _broken(path, size, f"holds {size} bytes, too few for a safetensors header")
        length = int.from_bytes(file.read(0, 8), "little")
        if length > LARGEST_HEADER:
            return _broken(
                path, size, f"header length {format_count(length)} is over the format's limit of "
                f"{format_count(LARGEST_HEADER)} bytes", "this is not a safetensors file"
            )  # fmt: skip
        if 8 + length > size:
            return _broken(
                path, size, f"header of {format_count(length)} bytes does not fit the file of "
                f"{format_count(size)}"
            )  # fmt: skip
        raw = bytes(file.read(8, length))
    finally:
        file.close()
    return _parse(path, raw, size)


def _broken(path: Path, size: int, what: str, fix: str = _COPY) -> Header:
    return Header((), (Finding(ERROR, str(path), what, fix),), "", size)


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, gc=False):
    """One entry of a header as the format wants it; fields that are absent stay None."""

    dtype: str = ""
    shape: tuple[_Natural, ...] | None = None
    data_offsets: tuple[_Natural, _Natural] | None = None


class _Metadata(msgspec.Struct):
    """The one entry of a header that is no tensor."""

    texts: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


_STRINGS_PER_ENTRY = 5  # its name, three keys, the type


def _read_plain(path: Path, raw: bytes) -> list[TensorInfo] | None:
    """Returns the tensors of a header in which nothing is odd, quickly; None sends it the careful
    way.

    Without escapes every string has two quotes: their number proves that no name is repeated and
    no entry holds a field more.
    """
    try:
        entries = msgspec.json.decode(raw, type=dict[str, _Entry])
        metadata = msgspec.json.decode(raw, type=_Metadata).texts
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    strings = 2 * len(metadata) + (entries.pop("__metadata__", None) is not None)
    strings += _STRINGS_PER_ENTRY * len(entries)
    if b"\\" in raw or raw.count(b'"') != 2 * strings:
        return None
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # most tensors are like others
    data_start, tensors = 8 + len(raw), []
    for name, entry in entries.items():
        dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
        if shape is None or offsets is None or dtype not in DTYPE_BITS:
            return None
        size = sizes.get((dtype, shape))
        if size is None:
            size = sizes[dtype, shape] = tensor_bytes(dtype, shape)
        begin, end = offsets
        if end - begin != size:
            return None
        tensors.append(TensorInfo(name, dtype, shape, path, data_start + begin, size, dtype))
    return tensors


def _decode(raw: bytes) -> tuple[object, list[str]]:
    """Decodes any header; the names that occur twice come beside. Raises ValueError."""
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            repeated.extend(duplicates(pairs))
        return fields

    return json.loads(raw.decode("utf-8"), object_pairs_hook=collect), repeated


def _parse(path: Path, raw: bytes, size: int) -> Header:
    digest, plain = blake3(raw).hexdigest(), _read_plain(path, raw)
    if plain is not None:
        seamless = _is_seamless(plain, 8 + len(raw), size)
        defects = () if seamless else tuple(_extents(path, plain, raw, size))
        return Header(tuple(plain), defects, digest, size)
    try:
        fields, repeated = _decode(raw)
    except (ValueError, RecursionError) as error:
        return _broken(path, size, f"header is not valid JSON: {error}")
    if not isinstance(fields, dict):
        return _broken(path, size, f"header is a JSON {type(fields).__name__}, not an object")
    findings = [
        Finding(ERROR, f"{path}, {name}", "name occurs twice in the header", _COPY)
        for name in repeated
    ]
    fields.pop("__metadata__", None)
    tensors: list[TensorInfo] = []
    for name, entry in fields.items():
        try:
            tensors.append(_tensor(path, name, entry, 8 + len(raw)))
        except ValueError as error:
            findings.append(Finding(ERROR, f"{path}, {name}", str(error), _COPY))
    if not findings:  # a bad entry leaves a gap that would be reported as a second defect
        findings.extend(_extents(path, tensors, raw, size))
    else:
        findings.extend(_beyond_end(path, tensors, size))
    return Header(tuple(tensors), tuple(findings), digest, size)


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError("entry must hold dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"unknown element type {dtype!r}")
    if not _naturals(shape):
        raise ValueError(f"shape {shape!r} is not a list of non-negative integers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {offsets!r} are not [begin, end]")
    num_bytes, wanted = offsets[1] - offsets[0], tensor_bytes(dtype, shape)
    if num_bytes != wanted:
        raise ValueError(
            f"{dtype} of shape {shape} takes {format_count(wanted)} bytes, data_offsets hold "
            f"{format_count(num_bytes)}"
        )
    return TensorInfo(
        name, dtype, tuple(shape), path, data_start + offsets[0], num_bytes, stored=dtype
    )


def _naturals(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return not [item for item in value if type(item) is not int or item < 0]


def _is_seamless(tensors: list[TensorInfo], data_start: int, size: int) -> bool:
    """Says whether each tensor begins where the one before it ends, up to the end of the file."""
    at = data_start
    for tensor in tensors:
        if tensor.offset != at:
            return False
        at += tensor.num_bytes
    return at == size


def _extents(path: Path, tensors: list[TensorInfo], raw: bytes, size: int) -> Iterator[Finding]:
    """Compares the runs of the tensors with each other and with the file."""
    data_start = 8 + len(raw)
    runs = sorted(tensors, key=lambda t: (t.offset, t.num_bytes))
    if runs and runs[0].offset != data_start:
        gap = runs[0].offset - data_start
        yield Finding(ERROR, f"{path}, {runs[0].name}", f"{gap} unused bytes before it", _COPY)
    for left, right in pairwise(runs):
        difference = right.offset - left.offset - left.num_bytes
        if difference:
            what = f"{difference} unused bytes" if difference > 0 else f"{-difference} bytes shared"
            where = f"{path}, {right.name}"
            yield Finding(ERROR, where, f"{what} between {left.name} and this tensor", _COPY)
    yield from _beyond_end(path, tensors, size)
    end = max((t.offset + t.num_bytes for t in tensors), default=data_start)
    if size > end:
        what = f"{format_count(size - end)} bytes after the last tensor that no tensor owns"
        yield Finding(ERROR, str(path), what, _COPY)


def _beyond_end(path: Path, tensors: Iterable[TensorInfo], size: int) -> Iterator[Finding]:
    for tensor in tensors:
        missing = tensor.offset + tensor.num_bytes - size
        if missing > 0:
            what = (
                f"file is truncated: it has {format_count(size)} bytes, this tensor ends "
                f"{format_count(missing)} bytes later"
            )
            yield Finding(ERROR, f"{path}, {tensor.name}", what, _COPY)
