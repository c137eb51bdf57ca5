"""Owns loading where one rank reads and the others listen: for file systems that all of them share.

A unit passes in windows of whole granules, each sent to every rank, which takes its own from it.
Plans no read and checks no parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from firstlight.checkpoint.digests import Entries
from firstlight.checkpoint.executor import RunReport, Worker
from firstlight.checkpoint.fill_granules import Parameters, granule_job
from firstlight.checkpoint.granule_plan import GranuleRead
from firstlight.checkpoint.positioned_io import InputFile, Staging
from firstlight.checkpoint.progress import Progress
from firstlight.checkpoint.store import Store
from firstlight.checkpoint.store_layout import (
    UnitRecord,
    block_offsets,
    first_entries,
    granule_bytes,
    stride,
)
from firstlight.checkpoint.torch_types import bytes_of
from firstlight.errors import EnvironmentProblem, FirstlightError

WINDOW_BYTES = 32 * 2**20


class Window(NamedTuple):
    """A run of whole granules of a unit's file: index entries [first, stop)."""

    unit: str
    first: int
    stop: int
    offset: int
    num_bytes: int


class _Received:
    """A window in memory, read like the file it is of."""

    direct = False

    def __init__(self, path: Path, window: Window, data: memoryview) -> None:
        self.path = path
        self._start, self._data = window.offset, data

    def read_staged(self, pages: Staging, offset: int, num_bytes: int) -> memoryview:
        at = offset - self._start
        return self._data[at : at + num_bytes]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        at = offset - self._start
        buffer[:] = self._data[at : at + len(buffer)]

    def read(self, offset: int, num_bytes: int) -> bytearray:
        at = offset - self._start
        return bytearray(self._data[at : at + num_bytes])


def windows_of(unit: UnitRecord, largest: int = WINDOW_BYTES) -> Iterator[Window]:
    """Yields windows that hold every granule of a unit once, of at most `largest` bytes or one
    granule."""
    for block, offset, entry in zip(
        unit.blocks, block_offsets(unit), first_entries(unit), strict=True
    ):
        step, total = stride(block), block.count * block.granules
        last = granule_bytes(block, block.granules - 1)
        many = max(1, largest // step)
        for start in range(0, total, many):
            stop = min(total, start + many)
            num_bytes = (stop - start - 1) * step + (last if stop == total else step)
            yield Window(unit.name, entry + start, entry + stop, offset + start * step, num_bytes)


def clipped(read: GranuleRead, window: Window) -> GranuleRead | None:
    """Returns the part of a read that lies in a window, None when none does."""
    first, stop = max(read.entry, window.first), min(read.entry + read.granules, window.stop)
    if first >= stop:
        return None
    step, skip = stride(read.unit.blocks[read.key.block]), first - read.entry
    whole = stop == read.entry + read.granules
    return msgspec.structs.replace(
        read,
        key=read.key._replace(granule=read.key.granule + skip),
        granules=stop - first,
        at=read.at + skip,
        entry=first,
        offset=read.offset + skip * step,
        num_bytes=read.num_bytes - skip * step if whole else (stop - first) * step,
    )


def fill_from_leader(
    parameters: Parameters,
    store: Store,
    reads: Sequence[GranuleRead],
    entries: Mapping[str, Entries],
    *,
    group: dist.ProcessGroup,
    progress: Progress,
) -> RunReport:
    """Makes the reads of every rank of a group from what its first rank reads. The group must move
    host memory; every rank calls this with its own reads.

    Raises on every rank what reading raises on the first, and DigestMismatch where bytes that
    arrived are not those of the store.
    """
    wanted: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(wanted, sorted({read.unit.name for read in reads}), group=group)
    names = {name for own in wanted for name in own}
    units = [unit for unit in store.manifest.units if unit.name in names]
    own: dict[str, list[GranuleRead]] = {}
    for read in reads:
        own.setdefault(read.unit.name, []).append(read)
    worker, done, total = Worker(), 0, sum(unit.size for unit in units)
    for window, data in _windows(store, units, group):
        file = _Received(store.bin_path(window.unit), window, data)
        for read in own.get(window.unit, ()):
            part = clipped(read, window)
            if part is not None:
                granule_job(parameters, file, part, entries.get(window.unit)).run(worker)
        done += window.num_bytes
        progress("load", done, total, window.unit)
    return RunReport(worker.seconds, 1)


def _windows(
    store: Store, units: Sequence[UnitRecord], group: dist.ProcessGroup
) -> Iterator[tuple[Window, memoryview]]:
    """Yields every window with its bytes, on all ranks; the first rank reads one ahead."""
    leader = dist.get_global_rank(group, 0)
    plan = [window for unit in units for window in windows_of(unit)]
    if dist.get_rank() != leader:
        for window in plan:
            data = torch.empty(window.num_bytes, dtype=torch.uint8)
            _share(data, "", leader, group)
            yield window, bytes_of(data)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="load-ahead") as reader:
        ahead: Future[torch.Tensor] | None = None
        for number, window in enumerate(plan):
            now = ahead or reader.submit(_read, store, window)
            data, problem = torch.empty(window.num_bytes, dtype=torch.uint8), ""
            try:
                data = now.result()
            except FirstlightError as error:
                problem = str(error)
            following = plan[number + 1] if number + 1 < len(plan) and not problem else None
            ahead = reader.submit(_read, store, following) if following else None
            _share(data, problem, leader, group)
            yield window, bytes_of(data)


def _share(data: torch.Tensor, problem: str, leader: int, group: dist.ProcessGroup) -> None:
    """Sends a window, or why there is none, which every rank then raises."""
    state = torch.tensor([len(problem.encode())])
    dist.broadcast(state, leader, group=group)
    if int(state[0]):
        text = torch.empty(int(state[0]), dtype=torch.uint8)
        if problem:
            text = torch.frombuffer(bytearray(problem.encode()), dtype=torch.uint8)
        dist.broadcast(text, leader, group=group)
        raise EnvironmentProblem(f"the rank that reads for all: {bytes(text.tolist()).decode()}")
    dist.broadcast(data, leader, group=group)


def _read(store: Store, window: Window) -> torch.Tensor:
    data = torch.empty(window.num_bytes, dtype=torch.uint8)
    file = InputFile(store.bin_path(window.unit))
    try:
        file.read_into(bytes_of(data), window.offset)
    finally:
        file.close()
    return data
