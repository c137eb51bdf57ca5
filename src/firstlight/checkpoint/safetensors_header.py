"""Owns the reading and checking of one safetensors header; knows no index and reads no values.

Layout of a file: 8 bytes header length (little-endian), a JSON object, then the data without gaps.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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


class Header(NamedTuple):
    """What one file says: sound tensors, defects, a digest of its header bytes, its size."""

    tensors: tuple[TensorInfo, ...]
    findings: tuple[Finding, ...]
    digest: str
    size: int


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


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One entry of a header as the format wants it."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def _decode_plain(raw: bytes) -> dict[str, _Entry] | None:
    """Decodes a header in which nothing is odd, quickly; None sends it the careful way.

    Without escapes each entry spells its key once, so equal counts prove that no name is repeated.
    """
    if b"\\" in raw:
        return None
    decode = msgspec.json.Decoder(_Entry).decode
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: decode(entry) for name, entry in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    same = raw.count(b'"data_offsets"') == len(entries) and raw.count(b'"__metadata__"') < 2
    return entries if same else None


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
    repeated: list[str] = []
    plain = _decode_plain(raw)
    fields: object = plain
    if plain is None:
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
    data_start = 8 + len(raw)
    tensors: list[TensorInfo] = []
    for name, entry in fields.items():
        try:
            tensors.append(_tensor(path, name, entry, data_start))
        except ValueError as error:
            findings.append(Finding(ERROR, f"{path}, {name}", str(error), _COPY))
    if not findings:  # a bad entry leaves a gap that would be reported as a second defect
        findings.extend(_extent_defects(path, tensors, data_start, size))
    else:
        findings.extend(_beyond_end(path, tensors, size))
    return Header(tuple(tensors), tuple(findings), blake3(raw).hexdigest(), size)


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if isinstance(entry, _Entry):
        dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    elif isinstance(entry, dict) and entry.keys() == _FIELDS:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    else:
        raise ValueError("entry must hold dtype, shape and data_offsets, nothing else")
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


def _extent_defects(
    path: Path, tensors: list[TensorInfo], data_start: int, size: int
) -> Iterator[Finding]:
    """Compares the runs of the tensors with each other and with the file."""
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
