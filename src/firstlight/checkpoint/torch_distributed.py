"""Owns the reading of torch.distributed checkpoints: a `.metadata` file and chunks of tensors.

Runs nothing that they hold. Each chunk is a small file of torch's own inside a `.distcp` file.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from firstlight.checkpoint.file_checkpoint import FileCheckpoint
from firstlight.checkpoint.findings import ERROR, Finding
from firstlight.checkpoint.inert_pickle import Record, read_inert
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.safetensors_header import Header
from firstlight.checkpoint.tensor_info import RAW_TYPES, Array, TensorInfo
from firstlight.checkpoint.torch_file import DTYPES, KNOWN_NAMES, read_torch_tensor
from firstlight.errors import TensorError
from firstlight.sharding.codecs import tensor_bytes

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_KNOWN: Mapping[str, str] = MappingProxyType(
    {
        **KNOWN_NAMES,
        f"{_MODULE}.metadata *": "*",
        f"{_MODULE}.filesystem *": "*",
        "pathlib PosixPath": "path",
        "pathlib._local PosixPath": "path",
    }
)
_HOLDERS = ("model", "state_dict", "module")
_SAVE_AGAIN = "save the checkpoint again"


class Chunk(NamedTuple):
    """A box of a tensor: where it begins, its lengths, and where its values lie in a file."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    offset: int


class _Stored(NamedTuple):
    """A chunk's place as the metadata say it."""

    file: Path
    offset: int
    length: int


class DistributedCheckpoint(FileCheckpoint):
    """A torch.distributed checkpoint; tensors in several chunks are put together when read."""

    def __init__(
        self,
        path: Path,
        *,
        headers: Mapping[Path, Header],
        findings: Iterable[Finding],
        chunks: Mapping[str, tuple[Chunk, ...]],
    ) -> None:
        super().__init__(path, kind="torch.distributed", headers=headers, findings=findings)
        self._chunks = chunks

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Returns a tensor, or the rows [start, stop) of it, as a new array."""
        if name not in self._chunks:
            return super().read(name, rows)
        info = self.tensors[name]
        start, stop, _ = (rows or slice(None)).indices(info.rows)
        values: Array = np.empty((stop - start, *info.shape[1:]), RAW_TYPES[info.dtype])
        for chunk in self._chunks[name]:
            low = max(start, chunk.first[0])
            high = min(stop, chunk.first[0] + chunk.shape[0])
            if low < high:
                box: Array = np.empty((high - low, *chunk.shape[1:]), values.dtype)
                skip = (low - chunk.first[0]) * prod(chunk.shape[1:]) * values.itemsize
                bytes_of_box = box.reshape(-1).view(np.uint8).data
                self._open(chunk.file).read_into(bytes_of_box, chunk.offset + skip)
                starts = (low - start, *chunk.first[1:])
                place = tuple(slice(a, a + n) for a, n in zip(starts, box.shape, strict=True))
                values[place] = box
        return values


def open_distributed(folder: Path) -> DistributedCheckpoint:
    """Opens a folder with `.metadata`, its defects in `findings`.

    Raises TensorError when the metadata cannot be read or hold anything but data.
    """
    path = folder / METADATA_NAME
    raw = path.read_bytes()
    content = read_inert(raw, str(path), _KNOWN)
    if not isinstance(content, Record) or not isinstance(
        content.field("state_dict_metadata"), dict
    ):
        raise TensorError(f"{path}: is not the metadata of a torch.distributed checkpoint")
    stored, findings = _storage(content, folder), []
    infos: dict[Path, list[TensorInfo]] = {}
    chunked: dict[str, tuple[Chunk, ...]] = {}
    files: dict[Path, InputFile] = {}
    try:
        for key, name in _names(content).items():
            where = f"{path}, {name}"
            try:
                info, chunks = _tensor(key, name, content, stored, files)
            except TensorError as error:
                findings.append(Finding(ERROR, where, str(error), _SAVE_AGAIN))
                continue
            infos.setdefault(info.file, []).append(info)
            if not info.in_place:
                chunked[name] = chunks
    finally:
        for file in files.values():
            file.close()
    digest = blake3(raw).hexdigest()
    headers = {
        file: Header(tuple(own), (), digest, file.stat().st_size) for file, own in infos.items()
    }
    return DistributedCheckpoint(folder, headers=headers, findings=findings, chunks=chunked)


def _names(content: Record) -> dict[str, str]:
    """Returns the names of the tensors by their keys; a model inside a larger state is found."""
    tensors = {
        key: value
        for key, value in content.field("state_dict_metadata").items()
        if isinstance(value, Record) and value.name == "TensorStorageMetadata"
    }
    paths = content.field("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    for holder in _HOLDERS:
        inner = {
            key: ".".join(map(str, paths[key][1:]))
            for key in tensors
            if isinstance(paths.get(key), tuple) and len(paths[key]) > 1 and paths[key][0] == holder
        }
        if inner:
            return inner
    return {key: str(key) for key in tensors}


def _storage(content: Record, folder: Path) -> dict[tuple[str, tuple[int, ...]], _Stored]:
    """Returns where each chunk is stored, by its tensor's key and its first element."""
    stored = {}
    places = content.field("storage_data")
    for index, place in (places if isinstance(places, dict) else {}).items():
        if not isinstance(index, Record) or not isinstance(place, Record):
            continue
        first, name = _sizes(index.field("offset")), str(place.field("relative_path"))
        if place.field("transform_descriptors"):
            raise TensorError(f"{folder / name}: chunks are compressed; {_SAVE_AGAIN} without")
        if Path(name).name != name:
            raise TensorError(f"{folder / METADATA_NAME}: {name!r} is not a file name")
        stored[str(index.field("fqn")), first] = _Stored(
            folder / name, place.field("offset"), place.field("length")
        )
    return stored


def _sizes(value: Any) -> tuple[int, ...]:
    """Returns a torch.Size of the metadata as a tuple; None has no dims."""
    if isinstance(value, Record) and value.arguments:
        value = value.arguments[0]
    return tuple(value) if isinstance(value, tuple) else ()


def _tensor(
    key: str,
    name: str,
    content: Record,
    stored: Mapping[tuple[str, tuple[int, ...]], _Stored],
    files: dict[Path, InputFile],
) -> tuple[TensorInfo, tuple[Chunk, ...]]:
    """Returns what is known of a tensor, and its chunks. Raises TensorError if any is wrong."""
    record = content.field("state_dict_metadata")[key]
    shape, dtype = _sizes(record.field("size")), _dtype(record.field("properties"))
    chunks = tuple(_chunks(key, dtype, record, stored, files))
    if not chunks or not _covers(shape, chunks):
        raise TensorError(f"its {len(chunks)} chunks do not make up {list(shape)} once")
    first, single = chunks[0], len(chunks) == 1
    num_bytes = tensor_bytes(dtype, shape)
    info = TensorInfo(
        name, dtype, shape, first.file, first.offset, num_bytes, stored=dtype, in_place=single
    )
    return info, chunks


def _dtype(properties: Any) -> str:
    state = properties.state if isinstance(properties, Record) else None
    named = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, dict):
        named = state.get("dtype")
    name = str(getattr(named, "name", "")).removeprefix("dtype:")
    if name not in DTYPES:
        raise TensorError(f"element type {name or 'not stated'} is not known")
    return DTYPES[name]


def _chunks(
    key: str,
    dtype: str,
    record: Record,
    stored: Mapping[tuple[str, tuple[int, ...]], _Stored],
    files: dict[Path, InputFile],
) -> Iterator[Chunk]:
    for chunk in record.field("chunks"):
        first, shape = _sizes(chunk.field("offsets")), _sizes(chunk.field("sizes"))
        place = stored.get((key, first))
        if place is None:
            raise TensorError(f"the chunk at {list(first)} is stored nowhere")
        if place.file not in files:
            if not place.file.is_file():
                raise TensorError(f"{place.file} is absent")
            files[place.file] = InputFile(place.file)
        found = read_torch_tensor(files[place.file], place.offset, place.length)
        if (found.dtype, found.shape, found.whole) != (dtype, shape, True):
            raise TensorError(
                f"{place.file} holds {found.dtype} {list(found.shape)} at byte {place.offset}, the "
                f"metadata say {dtype} {list(shape)}"
            )
        yield Chunk(first, shape, place.file, found.offset)


def _covers(shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> bool:
    """Says whether boxes fill a tensor without overlap."""
    for chunk in chunks:
        ends = [at + n for at, n in zip(chunk.first, chunk.shape, strict=True)]
        if len(ends) != len(shape) or any(e > n for e, n in zip(ends, shape, strict=True)):
            return False
    apart = all(
        any(
            a + n <= b or b + m <= a
            for a, n, b, m in zip(one.first, one.shape, two.first, two.shape, strict=True)
        )
        for number, one in enumerate(chunks)
        for two in chunks[:number]
    )
    return apart and sum(prod(chunk.shape) for chunk in chunks) == prod(shape)
