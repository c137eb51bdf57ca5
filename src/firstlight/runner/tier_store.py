"""Owns the content of units outside the device on one rank: moves, checksums, reads ahead.

Takes no decision: plans say what goes where. A unit whose bytes cannot be written, or are not those
that were written, is reported as lost and never handed out.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from firstlight.cache.far_pool import DISK, HOST, FarSizes
from firstlight.errors import EnvironmentProblem
from firstlight.runner.disk_tier import DiskTier
from firstlight.runner.host_tier import HostTier
from firstlight.runner.unit_bytes import GroupUnits, Row
from firstlight.schedule.step import Fetch, LostUnit, StepPlan, TierFlow, TierReport, UnitCopy

DIGEST_BYTES = 16
# Bytes that wait to be written to disk at most; more makes the step wait.
BEHIND_BYTES = 16 * 1024**2
# Seconds a step waits for the disk to take more; then what was to be written there is lost.
WRITE_SECONDS = 1.0
# Units that one task brings.
PER_TASK = 16
# How long a step without tokens waits for what is on its way.
IDLE_SECONDS = 0.05

Unit = tuple[int, int]


@dataclass
class GroupPlaces:
    """One cache group: its units on the device, how many lie where, and its part of the file."""

    units: GroupUnits
    sizes: FarSizes
    host: HostTier
    first_byte: int

    @property
    def first(self) -> int:
        """The least number of a unit outside the device."""
        return self.units.num_units

    def place(self, unit: int) -> str:
        """`host` or `disk`."""
        return HOST if unit < self.first + self.sizes.host else DISK

    def host_row(self, unit: int) -> Row:
        """The row of a unit in host memory."""
        return self.host.row(unit - self.first)

    def offset(self, unit: int) -> int:
        """Where a unit lies in the file, behind the header."""
        index = unit - self.first - self.sizes.host
        return self.first_byte + index * self.units.unit_bytes


@dataclass
class Ticket:
    """The tasks of one fetch. Once it is dropped they write nothing and tell of nothing: what they
    see is decided under `lock`.
    """

    tasks: list[Future[None]] = field(default_factory=list)
    is_dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class TierStore:
    """Content outside the device, by group and unit. One thread calls; others read and write."""

    def __init__(self, groups: Sequence[GroupPlaces], disk: DiskTier | None) -> None:
        self._groups, self._disk = groups, disk
        self._spans = [group.units.spans() for group in groups]
        self._digests: dict[Unit, list[bytes]] = {}
        self._writing: dict[Unit, Future[None]] = {}
        self._behind: deque[tuple[int, Future[None]]] = deque()
        self._tickets: dict[int, Ticket] = {}
        self._writers = ThreadPoolExecutor(2, thread_name_prefix="tier-write")
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="tier-read")
        self._lock = threading.Lock()
        self._lost: dict[Unit, str] = {}
        self._bytes: Counter[tuple[str, bool]] = Counter()
        self._seconds: dict[tuple[str, bool], float] = {}

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes of a page or slot of each group."""
        return tuple(group.units.unit_bytes for group in self._groups)

    @property
    def host_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(group.host.num_bytes for group in self._groups)

    def begin(self, plan: StepPlan) -> None:
        """Drops what is called back, then carries out the moves; writes go on behind."""
        for number in plan.recalled:
            self._drop(number)
        for move in plan.moves:
            self._move(move)

    def fetch(self, fetches: Iterable[Fetch]) -> None:
        """Begins to bring units to the device."""
        for fetch in fetches:
            ticket = self._tickets[fetch.ticket] = Ticket()
            for first in range(0, len(fetch.copies), PER_TASK):
                part = fetch.copies[first : first + PER_TASK]
                ticket.tasks.append(self._readers.submit(self._bring, ticket, part))

    def report(self, *, idle: bool = False) -> TierReport:
        """What is still on its way, and what was lost and moved since the last report; when `idle`,
        waits a moment for something to arrive.
        """
        under_way = [t for ticket in self._tickets.values() for t in ticket.tasks if not t.done()]
        if idle and under_way:
            wait(under_way, timeout=IDLE_SECONDS, return_when=FIRST_COMPLETED)
        for number, ticket in list(self._tickets.items()):
            if all(task.done() for task in ticket.tasks):
                for task in ticket.tasks:
                    task.result()  # what no unit is to blame for ends the rank
                del self._tickets[number]
        with self._lock:
            lost = [LostUnit(*unit, reason) for unit, reason in self._lost.items()]
            flows = [TierFlow(*k, size, self._seconds[k]) for k, size in self._bytes.items()]
            self._lost, self._bytes, self._seconds = {}, Counter(), {}
        return TierReport(list(self._tickets), lost, flows)

    def layer_bytes(self, group: int, layer: int) -> int:
        """Bytes of one layer's part of a unit."""
        return self._groups[group].units.layer_sizes[layer]

    def submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Has a reading thread do something."""
        return self._readers.submit(work, *arguments)

    def read_layer(self, group: int, unit: int, layer: int, buffer: Row) -> Row | None:
        """One layer's bytes of a unit outside the device, in `buffer` or where they lie; None when
        they cannot be had.
        """
        held, span = self._groups[group], self._spans[group][layer]
        began = time.perf_counter()
        try:
            self._settle((group, unit))
            data = self._layer_data(held, unit, span, buffer)
            digests = self._digests.get((group, unit))
            if digests is None or _digest(data) != digests[layer]:
                raise OSError("its bytes are not those that were written")
        except (OSError, EnvironmentProblem, MemoryError) as error:
            self._lose((group, unit), f"{held.place(unit)}: {error}")
            return None
        self._count(held.place(unit), True, data.nbytes, time.perf_counter() - began)
        return data

    def close(self) -> None:
        """Ends all copies and removes the file."""
        for number in list(self._tickets):
            self._drop(number)
        self._writers.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        if self._disk is not None:
            self._disk.close()

    def _layer_data(self, held: GroupPlaces, unit: int, span: slice, buffer: Row) -> Row:
        if held.place(unit) == HOST:
            row: Row = held.host_row(unit)[span]
            return row
        data = buffer[: span.stop - span.start]
        assert self._disk is not None, "a unit lies on a disk that is not there"
        self._disk.read(held.offset(unit) + span.start, data)
        return data

    def _move(self, move: UnitCopy) -> None:
        group, (source, target) = move.group, (move.source, move.target)
        held = self._groups[group]
        began = time.perf_counter()
        held.units.copy_summaries(source, target)
        try:
            self._settle((group, target), WRITE_SECONDS)
            self._digests.pop((group, target), None)
            if source >= held.first:
                self._spill(group, source, target)
            elif held.place(target) == HOST:
                row = held.host_row(target)
                held.units.read(source, row)
                self._later((group, target), row, None)
            else:
                row = np.empty(held.units.unit_bytes, np.uint8)
                held.units.read(source, row)
                self._later((group, target), row, None)
        except (EnvironmentProblem, MemoryError) as error:
            self._lose((group, target), str(error))
            return
        except FutureTimeout:
            self._lose((group, target), "disk: it does not take what is written in time")
            return
        if held.place(target) == HOST:
            self._count(HOST, False, held.units.unit_bytes, time.perf_counter() - began)

    def _spill(self, group: int, source: int, target: int) -> None:
        """Host to disk: the digests go along, so that what changes in host memory shows."""
        held = self._groups[group]
        self._settle((group, source))
        digests = self._digests.pop((group, source), None)
        if digests is None:
            self._lose((group, target), "what was to be moved there was lost before")
            return
        self._later((group, target), held.host_row(source).copy(), digests)

    def _later(self, unit: Unit, row: Row, digests: list[bytes] | None) -> None:
        """Takes the digests of a row and writes it, if it is one of the disk, in a thread."""
        deadline = time.monotonic() + WRITE_SECONDS
        while self._behind and sum(size for size, _ in self._behind) > BEHIND_BYTES:
            self._behind[0][1].result(max(0.0, deadline - time.monotonic()))
            self._behind.popleft()
        task = self._writers.submit(self._write, unit, row, digests)
        self._writing[unit] = task
        self._behind.append((row.nbytes, task))
        while self._behind and self._behind[0][1].done():
            self._behind.popleft()

    def _write(self, unit: Unit, row: Row, digests: list[bytes] | None) -> None:
        group, number = unit
        held, began = self._groups[group], time.perf_counter()
        found = digests or [_digest(row[span]) for span in self._spans[group]]
        if held.place(number) == DISK:
            assert self._disk is not None, "a unit is written to a disk that is not there"
            try:
                self._disk.write(held.offset(number), row)
            except OSError as error:
                self._lose(unit, f"{self._disk.path}: {error}")
                return
            self._count(DISK, False, row.nbytes, time.perf_counter() - began)
        self._digests[unit] = found

    def _settle(self, unit: Unit, seconds: float | None = None) -> None:
        """Waits until a unit that is written is whole. Raises FutureTimeout after `seconds`."""
        task = self._writing.get(unit)
        if task is not None:
            task.result(seconds)
            if self._writing.get(unit) is task:
                self._writing.pop(unit, None)

    def _bring(self, ticket: Ticket, copies: Sequence[UnitCopy]) -> None:
        sizes, began = Counter[str](), time.perf_counter()
        for copy in copies:
            if ticket.is_dropped:
                return
            held = self._groups[copy.group]
            self._bring_one(ticket, copy, held)
            sizes[held.place(copy.source)] += held.units.unit_bytes
        seconds, whole = time.perf_counter() - began, sum(sizes.values())
        for place, size in sizes.items():
            self._count(place, True, size, seconds * size / whole)

    def _bring_one(self, ticket: Ticket, copy: UnitCopy, held: GroupPlaces) -> None:
        """Brings one unit, or says that it is lost, unless nobody wants it any more."""
        unit, reason, row = (copy.group, copy.source), "", None
        try:
            self._settle(unit)
            if held.place(copy.source) == HOST:
                row = held.host_row(copy.source)
            else:
                row = np.empty(held.units.unit_bytes, np.uint8)
                assert self._disk is not None, "a unit lies on a disk that is not there"
                self._disk.read(held.offset(copy.source), row)
            digests, spans = self._digests.get(unit), self._spans[copy.group]
            if digests is None or [_digest(row[span]) for span in spans] != digests:
                reason = "its bytes are not those that were written"
        except (OSError, EnvironmentProblem, MemoryError) as error:
            reason = str(error)
        with ticket.lock:
            if ticket.is_dropped:
                return
            if reason or row is None:
                self._lose(unit, f"{held.place(copy.source)}: {reason}")
            else:
                held.units.write(copy.target, row)

    def _drop(self, number: int) -> None:
        """From its return on nothing of a ticket is written; reads may go on for nothing."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            with ticket.lock:
                ticket.is_dropped = True
            for task in ticket.tasks:
                task.cancel()

    def _lose(self, unit: Unit, reason: str) -> None:
        with self._lock:
            self._digests.pop(unit, None)
            self._lost[unit] = reason

    def _count(self, place: str, inward: bool, size: int, seconds: float) -> None:
        with self._lock:
            self._bytes[place, inward] += size
            self._seconds[place, inward] = self._seconds.get((place, inward), 0.0) + seconds


def _digest(data: Row) -> bytes:
    return blake3(data.data).digest(DIGEST_BYTES)
