"""Owns what is on its way out of the device: checksums taken and pages written while steps go on.

Takes no decision. What cannot be written is told to the ledger, and the step waits a bounded time
at most for a disk that does not keep up.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import NamedTuple

from firstlight.cache.far_pool import DISK, HOST
from firstlight.runner.disk_tier import DiskTier
from firstlight.runner.staging_rows import StagingRows
from firstlight.runner.unit_bytes import Row
from firstlight.runner.unit_ledger import Unit, UnitLedger, row_digests
from firstlight.runner.unit_places import GroupPlaces, runs

# Seconds that all moves of a step wait for the disk to take more; then what was to be written there
# is lost.
WRITE_SECONDS = 1.0


class Outgoing(NamedTuple):
    """A unit whose row is filled; `digests` are known if it comes from host memory."""

    unit: int
    row: Row
    digests: list[bytes] | None


@dataclass
class Piece:
    """Units of one group for one place, the rows of those for the disk in one buffer; `task` writes
    them.
    """

    group: int
    place: str
    buffer: Row | None = None
    units: list[Outgoing] = field(default_factory=list)
    task: Future[None] | None = None


class WriteBehind:
    """Units between the copy out of the device and their place.

    One thread calls; others only `settle` what was flushed.
    """

    def __init__(
        self,
        groups: Sequence[GroupPlaces],
        disk: DiskTier | None,
        ledger: UnitLedger,
        staging: StagingRows,
    ) -> None:
        self._groups, self._disk, self._ledger = groups, disk, ledger
        self._staging = staging
        self._open: dict[tuple[int, str], Piece] = {}
        self._unwritten: dict[Unit, Piece] = {}
        # A disk that hangs must not keep others from host memory.
        self._threads = {
            HOST: ThreadPoolExecutor(2, thread_name_prefix="tier-digest"),
            DISK: ThreadPoolExecutor(2, thread_name_prefix="tier-write"),
        }
        self._deadline = 0.0

    def begin(self) -> None:
        """Begins the moves of a step."""
        self._deadline = time.monotonic() + WRITE_SECONDS

    def row(self, unit: Unit) -> Row:
        """Where a unit is to be copied, before `add`; what was added for it before is done with.

        Raises OSError when the disk takes no more, MemoryError or EnvironmentProblem when the host
        gives no memory.
        """
        group, number = unit
        held = self._groups[group]
        self.settle(unit, self._left)
        self._ledger.forget(unit)
        if held.place(number) == HOST:
            return held.host_row(number)
        piece, size = self._open.get((group, DISK)) or self._open_buffer(group), held.unit_bytes
        assert piece.buffer is not None
        first = len(piece.units) * size
        row: Row = piece.buffer[first : first + size]
        return row

    def add(self, unit: Unit, row: Row, digests: list[bytes] | None = None) -> None:
        """Hands over a row that was filled."""
        group, number = unit
        held, place = self._groups[group], self._groups[group].place(number)
        piece = self._open.setdefault((group, place), Piece(group, place))
        piece.units.append(Outgoing(number, row, digests))
        self._unwritten[unit] = piece
        if len(piece.units) == held.per_piece:
            self._submit(piece)

    def flush(self) -> None:
        """Begins to write all that was added."""
        for piece in list(self._open.values()):
            self._submit(piece)

    def settle(self, unit: Unit, seconds: float | None = None) -> None:
        """Waits until a unit that was added is whole. Raises TimeoutError after `seconds`."""
        piece = self._unwritten.get(unit)
        if piece is None:
            return
        if piece.task is None:
            self._submit(piece)
        assert piece.task is not None
        try:
            piece.task.result(seconds)
        except FutureTimeout as error:
            raise TimeoutError("it does not take in time what is written") from error

    def close(self, *, wait: bool) -> None:
        """Ends the threads; what is not written yet never is."""
        for pool in self._threads.values():
            pool.shutdown(wait=wait, cancel_futures=True)

    @property
    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _open_buffer(self, group: int) -> Piece:
        """One buffer is open at a time: who waits for memory must not hold what others wait for."""
        assert self._disk is not None, "a unit is written to a disk that is not there"
        self._disk.require_signs()
        for piece in list(self._open.values()):
            if piece.place == DISK:
                self._submit(piece)
        held = self._groups[group]
        buffer = self._staging.lend(held.per_piece * held.unit_bytes, self._left)
        piece = self._open[group, DISK] = Piece(group, DISK, buffer)
        return piece

    def _submit(self, piece: Piece) -> None:
        self._open.pop((piece.group, piece.place), None)
        piece.task = self._threads[piece.place].submit(self._write, piece)

    def _write(self, piece: Piece) -> None:
        held, began = self._groups[piece.group], time.perf_counter()
        units = sorted(piece.units)
        digests = [one.digests or row_digests(one.row, held.spans) for one in units]
        refused: set[int] = set()
        if piece.place == DISK:
            refused = self._write_rows(held, units, piece.group)
            size = held.unit_bytes * (len(units) - len(refused))
            self._ledger.count(DISK, size, time.perf_counter() - began, inward=False)
        for one, found in zip(units, digests, strict=True):
            if one.unit not in refused:
                self._ledger.keep((piece.group, one.unit), found)
            self._unwritten.pop((piece.group, one.unit), None)
        piece.units = []
        if piece.buffer is not None:
            self._staging.give_back(piece.buffer)
            piece.buffer = None

    def _write_rows(self, held: GroupPlaces, units: Sequence[Outgoing], group: int) -> set[int]:
        """Writes neighbours at once; returns the units that the disk refused."""
        assert self._disk is not None, "units are written to a disk that is not there"
        refused: set[int] = set()
        numbers = [one.unit for one in units]
        for run in runs(numbers):
            try:
                self._disk.write(held.offset(numbers[run.start]), [one.row for one in units[run]])
            except OSError as error:
                refused.update(numbers[run])
                for number in numbers[run]:
                    self._ledger.lose((group, number), f"{self._disk.path}: {error}")
        return refused
