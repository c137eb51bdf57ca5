"""Owns fetches: units on their way to the device while others are computed, ticket by ticket.

Takes no decision. Neighbours on the disk are read at once; a unit that is not what was written is
told to the ledger.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from firstlight.cache.far_pool import DISK, HOST
from firstlight.errors import EnvironmentProblem
from firstlight.runner.disk_tier import DiskTier
from firstlight.runner.staging_rows import StagingRows
from firstlight.runner.unit_bytes import Row
from firstlight.runner.unit_ledger import UnitLedger
from firstlight.runner.unit_places import GroupPlaces, runs
from firstlight.runner.write_behind import WriteBehind
from firstlight.schedule.incoming import OVERDUE_SECONDS
from firstlight.schedule.step import Fetch, UnitCopy

CHANGED = "its bytes are not those that were written"


@dataclass
class Ticket:
    """The tasks of one fetch. Once it is dropped they write nothing and tell of nothing: what they
    see is decided under `lock`.
    """

    tasks: dict[Future[None], Sequence[UnitCopy]] = field(default_factory=dict)
    is_dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReadAhead:
    """Tickets and the threads that work on them; `behind` is asked whether a unit is whole yet."""

    def __init__(
        self,
        groups: Sequence[GroupPlaces],
        disk: DiskTier | None,
        *,
        behind: WriteBehind,
        ledger: UnitLedger,
        staging: StagingRows,
    ) -> None:
        self._groups, self._disk = groups, disk
        self._behind, self._ledger, self._staging = behind, ledger, staging
        self._tickets: dict[int, Ticket] = {}
        # A disk that hangs must not keep others from host memory.
        self._threads = {
            place: ThreadPoolExecutor(4, thread_name_prefix=f"tier-{place}")
            for place in (HOST, DISK)
        }

    def begin(self, fetch: Fetch) -> None:
        """Begins to bring the units of a ticket."""
        ticket = self._tickets[fetch.ticket] = Ticket()
        for place, part in self._parts(fetch.copies):
            ticket.tasks[self.submit(place, self._bring, ticket, place, part)] = part

    def submit(self, place: str, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Has a thread that reads from a place do something."""
        return self._threads[place].submit(work, *arguments)

    def drop(self, number: int) -> None:
        """From its return on nothing of a ticket is written; reads may go on for nothing."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            with ticket.lock:
                ticket.is_dropped = True
            for task in ticket.tasks:
                task.cancel()

    def pending(self, *, seconds: float = 0.0) -> list[int]:
        """The tickets that have not ended; waits so long at most for a part of one to arrive.

        What a silent disk has not given by now is lost.
        """
        under_way = [t for ticket in self._tickets.values() for t in ticket.tasks if not t.done()]
        if seconds and under_way:
            wait(under_way, timeout=seconds, return_when=FIRST_COMPLETED)
        if self._disk is not None and self._disk.is_silent:
            self._give_up(self._disk)
        for number, ticket in list(self._tickets.items()):
            if all(task.done() for task in ticket.tasks):
                for task in ticket.tasks:
                    task.result()  # what no unit is to blame for ends the rank
                del self._tickets[number]
        return list(self._tickets)

    def close(self, *, wait: bool) -> None:
        """Drops all tickets and ends the threads."""
        for number in list(self._tickets):
            self.drop(number)
        for pool in self._threads.values():
            pool.shutdown(wait=wait, cancel_futures=True)

    def _give_up(self, disk: DiskTier) -> None:
        for number, ticket in list(self._tickets.items()):
            left = [task for task in ticket.tasks if not task.done()]
            copies = [copy for task in left for copy in ticket.tasks[task]]
            lost = [c for c in copies if self._groups[c.group].place(c.source) == DISK]
            if lost:
                self.drop(number)
            for copy in lost:
                self._ledger.lose((copy.group, copy.source), disk.silence)

    def _parts(self, copies: Sequence[UnitCopy]) -> Iterator[tuple[str, list[UnitCopy]]]:
        """Cuts copies into tasks, each of one group and place, units in the order they lie in."""
        parts: dict[tuple[int, str], list[UnitCopy]] = {}
        for copy in sorted(copies, key=lambda copy: copy.source):
            place = self._groups[copy.group].place(copy.source)
            parts.setdefault((copy.group, place), []).append(copy)
        for (group, place), part in parts.items():
            size = self._groups[group].per_piece
            for first in range(0, len(part), size):
                yield place, part[first : first + size]

    def _bring(self, ticket: Ticket, place: str, copies: Sequence[UnitCopy]) -> None:
        """Brings units, or says which are lost, unless nobody wants them any more."""
        if ticket.is_dropped:
            return
        began, held = time.perf_counter(), self._groups[copies[0].group]
        size = len(copies) * held.unit_bytes
        buffer = self._staging.lend(size) if place == DISK else None
        try:
            found = self._rows(held, copies, buffer)
            with ticket.lock:
                if ticket.is_dropped:
                    return
                for copy, row in zip(copies, found, strict=True):
                    if isinstance(row, str):
                        self._ledger.lose((copy.group, copy.source), f"{place}: {row}")
                    else:
                        held.units.write(copy.target, row)
        finally:
            if buffer is not None:
                self._staging.give_back(buffer)
        self._ledger.count(place, size, time.perf_counter() - began, inward=True)

    def _rows(
        self, held: GroupPlaces, copies: Sequence[UnitCopy], buffer: Row | None
    ) -> list[Row | str]:
        """Returns the row of each unit, or why it cannot be had.

        What is still not written has no checksum, and is not waited for any longer.
        """
        group, units = copies[0].group, [copy.source for copy in copies]
        latest = time.monotonic() + OVERDUE_SECONDS
        for unit in units:
            with suppress(TimeoutError):
                self._behind.settle((group, unit), max(0.0, latest - time.monotonic()))
        found: list[Row | str] = []
        if buffer is None:
            found += [_host_row(held, unit) for unit in units]
        else:
            rows = list(buffer.reshape(len(units), -1))
            for run in runs(units):
                found += self._disk_rows(held, units[run], rows=rows[run])
        for index, (unit, row) in enumerate(zip(units, found, strict=True)):
            if not isinstance(row, str):
                is_whole = self._ledger.is_whole((group, unit), row, held.spans)
                found[index] = row if is_whole else CHANGED
        return found

    def _disk_rows(
        self, held: GroupPlaces, units: Sequence[int], *, rows: Sequence[Row]
    ) -> list[Row | str]:
        """Fills rows that follow each other in memory and on disk, each by itself if need be."""
        assert self._disk is not None, "units lie on a disk that is not there"
        try:
            self._disk.read(held.offset(units[0]), rows)
            return list(rows)
        except OSError as error:
            if len(units) == 1:
                return [str(error)]
        pairs = zip(units, rows, strict=True)
        return [row for unit, one in pairs for row in self._disk_rows(held, [unit], rows=[one])]


def _host_row(held: GroupPlaces, unit: int) -> Row | str:
    try:
        return held.host_row(unit)
    except (EnvironmentProblem, MemoryError) as error:
        return str(error)
