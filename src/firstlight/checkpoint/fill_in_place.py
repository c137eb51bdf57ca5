"""Owns the reading of granules straight into parameters; plans nothing and knows no way around.

A part whose granules follow each other in its parameter takes the file's bytes where they end up:

    file ->    | g0: w1 | w3 | w2 | g1: w1 | w3 | w2 | ...      one preadv, many destinations
    w1 memory  | g0 | g1 | ...      w3 memory | g0 | g1 | ...      w2: staging, then interleaved
"""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from firstlight.checkpoint.digests import Entries, scattered_digest
from firstlight.checkpoint.executor import Worker
from firstlight.checkpoint.fill_tensors import destination
from firstlight.checkpoint.granule_plan import GranuleRead
from firstlight.checkpoint.granule_values import (
    Parameters,
    compare_digest,
    part_values,
    place_values,
)
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.read_plan import Target
from firstlight.checkpoint.store_layout import (
    PartPlace,
    PartRecord,
    granule_parts,
    stride,
)
from firstlight.checkpoint.torch_types import TORCH_TYPES, bytes_of
from firstlight.sharding.codecs import find_codec

# Below this a part costs more as a destination of its own than as a copy.
SMALLEST_SLAB = 16 * 2**10


class _Run(NamedTuple):
    """Bytes [start, stop) of every granule; `slab` is the memory they end up in, granule after
    granule, None for what is staged."""

    start: int
    stop: int
    slab: memoryview | None


def runs_in_place(parameters: Parameters, read: GranuleRead) -> list[_Run]:
    """Returns how a read's granules are dealt to memory; empty when all of it must be staged."""
    block = read.unit.blocks[read.key.block]
    size = read.num_bytes if read.granules == 1 else stride(block)
    runs, at, found = list[_Run](), 0, False
    places = granule_parts(block, read.key.granule)
    for part, place, target in zip(block.parts, places, read.targets, strict=True):
        slab = _slab(parameters, read, target, part=part, place=place)
        if slab is None:
            continue
        found = True
        if place.offset > at:
            runs.append(_Run(at, place.offset, None))
        at = place.offset + place.num_bytes
        runs.append(_Run(place.offset, at, slab))
    if at < size:
        runs.append(_Run(at, size, None))
    return runs if found else []


def _slab(
    parameters: Parameters,
    read: GranuleRead,
    target: Target | None,
    *,
    part: PartRecord,
    place: PartPlace,
) -> memoryview | None:
    """Returns the memory that all of a read's granules of a part fill in the order of the file."""
    if target is None or target.part.zero or target.part.dim or not place.shape:
        return None
    if find_codec(part.codec).quantised or place.num_bytes < SMALLEST_SLAB:
        return None
    tensor, length = destination(parameters, target), place.shape[0]
    if tensor.device.type != "cpu" or tensor.dtype != TORCH_TYPES[part.dtype]:
        return None
    step = read.unit.blocks[read.key.block].piece_rows or length
    rows = tensor.narrow(0, read.at * step, read.granules * length)
    return bytes_of(rows) if rows.is_contiguous() else None


def fill_in_place(
    parameters: Parameters,
    file: InputFile,
    read: GranuleRead,
    runs: Sequence[_Run],
    *,
    entries: Entries | None,
    worker: Worker,
) -> None:
    """Makes a read as `runs` deal it, checks every granule, and places what was staged.

    Raises DigestMismatch; what lies in parameters then must not be used.
    """
    size = runs[-1].stop
    started = perf_counter()
    staged = worker.pages(read.granules * size)
    taken = [_pieces(run, read.granules, staged=staged, size=size) for run in runs]
    granules = list(zip(*taken, strict=True))
    file.read_scattered([piece for granule in granules for piece in granule], read.offset)
    started = worker.spend("read", started)
    if entries is not None:
        for number, granule in enumerate(granules):
            _check(granule, read, number, entries=entries, file=file)
        started = worker.spend("hash", started)
    _place_staged(parameters, read, runs, staged)
    worker.spend("place", started)


def _pieces(run: _Run, granules: int, *, staged: memoryview, size: int) -> list[memoryview]:
    """Returns where a run of each granule goes."""
    length = run.stop - run.start
    if run.slab is not None:
        return [run.slab[at : at + length] for at in range(0, granules * length, length)]
    starts = range(run.start, run.start + granules * size, size)
    return [staged[start : start + length] for start in starts]


def _check(
    granule: Sequence[memoryview],
    read: GranuleRead,
    number: int,
    *,
    entries: Entries,
    file: InputFile,
) -> None:
    key = read.key._replace(granule=read.key.granule + number)
    found = scattered_digest(granule, read.unit.name, key)
    compare_digest(found, entries, read.entry + number, path=file.path, unit=read.unit, key=key)


def _place_staged(
    parameters: Parameters, read: GranuleRead, runs: Sequence[_Run], staged: memoryview
) -> None:
    """Puts the parts that did not arrive in place where they belong."""
    block = read.unit.blocks[read.key.block]
    arrived = {run.start for run in runs if run.slab is not None}
    rows = torch.frombuffer(staged, dtype=torch.uint8).view(read.granules, -1)
    places = granule_parts(block, read.key.granule)
    for part, place, target in zip(block.parts, places, read.targets, strict=True):
        if target is not None and not target.part.zero and place.offset not in arrived:
            part_rows = rows[:, place.offset : place.offset + place.num_bytes]
            values = part_values(part_rows, part, place)
            place_values(parameters, read, target, block=block, values=values)
