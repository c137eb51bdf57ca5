"""Owns how granules of a store are read, checked and put in place; plans nothing.

A granule is hashed as one run of bytes before a value of it is used.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from blake3 import blake3

from firstlight.checkpoint.digests import Entries, close_digest, granule_digest
from firstlight.checkpoint.executor import Job, Worker
from firstlight.checkpoint.fill_in_place import fill_in_place, runs_in_place
from firstlight.checkpoint.fill_tensors import destination
from firstlight.checkpoint.granule_plan import GranuleRead
from firstlight.checkpoint.granule_values import (
    Parameters,
    compare_digest,
    part_values,
    place_values,
)
from firstlight.checkpoint.positioned_io import InputFile, Staging
from firstlight.checkpoint.read_plan import LARGEST_READ, Target
from firstlight.checkpoint.store_layout import (
    PartPlace,
    PartRecord,
    granule_bytes,
    granule_parts,
    stride,
)
from firstlight.checkpoint.torch_types import TORCH_TYPES, bytes_of
from firstlight.sharding.codecs import find_codec


class GranuleSource(Protocol):
    """What granules are read from: a file, or a run of one that another rank has sent."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def direct(self) -> bool:
        """Whether `read_staged` passes by the page cache."""
        ...

    def read_staged(self, pages: Staging, offset: int, num_bytes: int) -> memoryview:
        """Returns the bytes from `offset` on."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills the buffer from `offset` on."""
        ...

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """Returns exactly `num_bytes` from `offset` on."""
        ...


def granule_job(
    parameters: Parameters, file: GranuleSource, read: GranuleRead, entries: Entries | None
) -> Job:
    """Returns the job of one read. Its digests are compared with `entries` unless that is None."""
    fill: Callable[..., None] = _fill_staged
    if read.granules == 1 and read.num_bytes > LARGEST_READ:
        fill = _fill_by_part
    run = partial(fill, parameters, file, read, entries)
    return Job(read.unit.name, file.path, read.offset, read.num_bytes, run)


def _fill_staged(
    parameters: Parameters,
    file: GranuleSource,
    read: GranuleRead,
    entries: Entries | None,
    worker: Worker,
) -> None:
    if isinstance(file, InputFile) and not file.direct:
        runs = runs_in_place(parameters, read)
        if runs:
            fill_in_place(parameters, file, read, runs, entries=entries, worker=worker)
            return
    block, whole = read.unit.blocks[read.key.block], stride(read.unit.blocks[read.key.block])
    started = perf_counter()
    staged = file.read_staged(worker.pages, read.offset, read.num_bytes)
    started = worker.spend("read", started)
    if entries is not None:
        for number in range(read.granules):
            key = read.key._replace(granule=read.key.granule + number)
            data = staged[number * whole : (number + 1) * whole]
            found = granule_digest(data, read.unit.name, key)
            compare_digest(
                found, entries, read.entry + number, path=file.path, unit=read.unit, key=key
            )
        started = worker.spend("hash", started)
    rows = torch.frombuffer(staged, dtype=torch.uint8).view(read.granules, -1)
    places = granule_parts(block, read.key.granule)
    for part, place, target in zip(block.parts, places, read.targets, strict=True):
        if target is not None and not target.part.zero:
            values = part_values(
                rows[:, place.offset : place.offset + place.num_bytes], part, place
            )
            place_values(parameters, read, target, block=block, values=values)
    worker.spend("place", started)


def _fill_by_part(
    parameters: Parameters,
    file: GranuleSource,
    read: GranuleRead,
    entries: Entries | None,
    worker: Worker,
) -> None:
    """Reads one large granule part by part, straight into place where the bytes allow it."""
    block, hasher, at = read.unit.blocks[read.key.block], blake3(), 0
    places = granule_parts(block, read.key.granule)
    ends = [place.offset for place in places[1:]]
    ends.append(granule_bytes(block, read.key.granule))
    for number, (place, end) in enumerate(zip(places, ends, strict=True)):
        target = read.targets[number]
        started = perf_counter()
        part = block.parts[number]
        buffer = _own_bytes(parameters, target, place=place, part=part)
        direct = buffer is not None
        if buffer is None:
            buffer = worker.staging(place.num_bytes)
        _read_large(file, buffer, read.offset + at, worker)
        padding = file.read(read.offset + at + place.num_bytes, end - at - place.num_bytes)
        started = worker.spend("read", started)
        if entries is not None:
            hasher.update(buffer)
            hasher.update(padding)
            started = worker.spend("hash", started)
        if not direct and target is not None and not target.part.zero:
            rows = torch.frombuffer(buffer, dtype=torch.uint8).view(1, -1)
            values = part_values(rows, part, place)
            place_values(parameters, read, target, block=block, values=values)
            worker.spend("place", started)
        at = end
    if entries is not None:
        found = close_digest(hasher, read.unit.name, read.key)
        compare_digest(found, entries, read.entry, path=file.path, unit=read.unit, key=read.key)


def _read_large(file: GranuleSource, buffer: memoryview, offset: int, worker: Worker) -> None:
    """Fills a buffer, by way of aligned memory where the page cache is passed by."""
    if not file.direct:
        file.read_into(buffer, offset)
        return
    for start in range(0, len(buffer), LARGEST_READ):
        count = min(LARGEST_READ, len(buffer) - start)
        buffer[start : start + count] = file.read_staged(worker.pages, offset + start, count)


def _own_bytes(
    parameters: Parameters,
    target: Target | None,
    *,
    place: PartPlace,
    part: PartRecord,
) -> memoryview | None:
    """Returns the target's own memory when the part's bytes can be read straight into it."""
    if target is None or target.part.zero or find_codec(part.codec).quantised:
        return None
    tensor = destination(parameters, target)
    whole = tensor.numel() == prod(place.shape) and tensor.is_contiguous()
    if tensor.device.type != "cpu" or tensor.dtype != TORCH_TYPES[part.dtype] or not whole:
        return None
    return bytes_of(tensor)
