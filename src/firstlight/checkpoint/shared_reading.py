"""Owns loading where one rank reads and the others listen: for file systems that all of them share.

A unit passes in windows of whole granules, each sent to every rank, which takes its own from it.
Plans no read and checks no parameter.
"""

import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from firstlight.checkpoint.digests import Entries
from firstlight.checkpoint.executor import Patience, RunReport, Worker
from firstlight.checkpoint.fill_granules import granule_job
from firstlight.checkpoint.granule_plan import GranuleRead
from firstlight.checkpoint.granule_values import Parameters
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
from firstlight.units import format_bytes, format_count, format_seconds

_LOGGER = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
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
    patience: Patience,
) -> RunReport:
    """Makes the reads of every rank of a group from what its first rank reads. The group must move
    host memory; every rank calls this with its own reads.

    Raises on every rank what reading raises on the first, a standstill of `patience` included, and
    DigestMismatch where bytes that arrived are not those of the store.
    """
    wanted: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(wanted, sorted({read.unit.name for read in reads}), group=group)
    names = {name for own in wanted for name in own}
    units = [unit for unit in store.manifest.units if unit.name in names]
    own: dict[str, list[GranuleRead]] = {}
    for read in reads:
        own.setdefault(read.unit.name, []).append(read)
    worker, done, total = Worker(), 0, sum(unit.size for unit in units)
    for window, data in _windows(store, units, group, patience):
        file = _Received(store.bin_path(window.unit), window, data)
        for read in own.get(window.unit, ()):
            part = clipped(read, window)
            if part is not None:
                granule_job(parameters, file, part, entries.get(window.unit)).run(worker)
        done += window.num_bytes
        progress("load", done, total, window.unit)
    return RunReport(worker.seconds, 1)


def _windows(
    store: Store, units: Sequence[UnitRecord], group: dist.ProcessGroup, patience: Patience
) -> Iterator[tuple[Window, memoryview]]:
    """Yields every window with its bytes, on all ranks; the first rank reads ahead."""
    leader = dist.get_global_rank(group, 0)
    plan = [window for unit in units for window in windows_of(unit)]
    if dist.get_rank() != leader:
        for window in plan:
            data = torch.empty(window.num_bytes, dtype=torch.uint8)
            _share(data, "", leader, group)
            yield window, bytes_of(data)
        return
    ahead = _ReadAhead(store, plan, patience)
    try:
        for window in plan:
            data, problem = torch.empty(window.num_bytes, dtype=torch.uint8), ""
            try:
                data = ahead.take(window)
            except FirstlightError as error:
                problem = str(error)
            _share(data, problem, leader, group)
            yield window, bytes_of(data)
    finally:
        ahead.stop()


class _ReadAhead:
    """Reads windows in a thread of its own, and watches that it gets on."""

    def __init__(self, store: Store, plan: Sequence[Window], patience: Patience) -> None:
        self._store, self._plan, self._patience = store, plan, patience
        self._read: queue.Queue[torch.Tensor | FirstlightError] = queue.Queue(1)
        self._stop = threading.Event()
        # A daemon: stuck in a read of a dead device it must not keep the process alive.
        threading.Thread(target=self._run, name="load-ahead", daemon=True).start()

    def take(self, window: Window) -> torch.Tensor:
        """Returns the next window. Raises what reading it raised, or EnvironmentProblem naming
        rank, file and offset when it does not come."""
        idle, patience = 0.0, self._patience
        for seconds in (patience.alert_seconds, patience.stall_seconds - patience.alert_seconds):
            try:
                found = self._read.get(timeout=max(0.0, seconds))
            except queue.Empty:
                idle += seconds
                _LOGGER.warning("%s", text := self._stalled(window, idle))
                continue
            if isinstance(found, FirstlightError):
                raise found
            return found
        raise EnvironmentProblem(text)

    def stop(self) -> None:
        """Reads no further."""
        self._stop.set()

    def _run(self) -> None:
        for window in self._plan:
            try:
                found: torch.Tensor | FirstlightError = _read(self._store, window)
            except FirstlightError as error:
                found = error
            except OSError as error:  # the process edge of this thread
                found = EnvironmentProblem(str(error))
            while not self._stop.is_set():
                try:
                    self._read.put(found, timeout=_LOOK_SECONDS)
                    break
                except queue.Full:
                    continue
            if self._stop.is_set() or isinstance(found, FirstlightError):
                return

    def _stalled(self, window: Window, idle: float) -> str:
        where = f"{self._store.bin_path(window.unit)} at byte {format_count(window.offset)}"
        return (
            f"rank {dist.get_rank()}: no byte arrived for {format_seconds(idle)}; waiting for "
            f"{where} ({format_bytes(window.num_bytes)}, {window.unit}). Check that the storage "
            "answers"
        )


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
