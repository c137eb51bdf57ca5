"""Owns the content of units outside the device on one rank: moves, fetches, reads where it lies.

Takes no decision: plans say what goes where. A unit whose bytes cannot be written, or are not those
that were written, is reported as lost and never handed out.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any

from firstlight.cache.far_pool import HOST
from firstlight.errors import EnvironmentProblem
from firstlight.runner.disk_tier import DiskTier
from firstlight.runner.page_copies import copy_pages
from firstlight.runner.read_ahead import CHANGED, ReadAhead
from firstlight.runner.staging_rows import StagingRows
from firstlight.runner.unit_bytes import Row
from firstlight.runner.unit_ledger import UnitLedger
from firstlight.runner.unit_places import GroupPlaces
from firstlight.runner.write_behind import WriteBehind
from firstlight.schedule.incoming import OVERDUE_SECONDS
from firstlight.schedule.step import Fetch, StepPlan, TierReport, UnitCopy
from firstlight.sharding.tier_pieces import STAGING_BYTES, STAGING_SHARE

# How long a step without tokens waits for what is on its way.
IDLE_SECONDS = 0.05


class TierStore:
    """Content outside the device, by group and unit. One thread calls; others read and write."""

    def __init__(self, groups: Sequence[GroupPlaces], disk: DiskTier | None) -> None:
        self._groups, self._disk = groups, disk
        self._ledger = UnitLedger()
        in_host = sum(group.sizes.host * group.unit_bytes for group in groups)
        most = min(STAGING_BYTES, int(in_host * STAGING_SHARE)) if in_host else STAGING_BYTES
        self._outgoing, self._incoming = (StagingRows(most) for _ in range(2))
        self._behind = WriteBehind(groups, disk, self._ledger, self._outgoing)
        self._ahead = ReadAhead(
            groups, disk, behind=self._behind, ledger=self._ledger, staging=self._incoming
        )
        self._layers = {index: group.units.layers for index, group in enumerate(groups)}

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes of a page or slot of each group."""
        return tuple(group.unit_bytes for group in self._groups)

    @property
    def host_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(group.host.num_bytes for group in self._groups)

    @property
    def staging_bytes(self) -> int:
        """Host memory that units pass through on their way to and from the disk."""
        return self._outgoing.num_bytes + self._incoming.num_bytes

    @property
    def is_silent(self) -> bool:
        """Whether the disk has given no sign for so long that nobody is to wait for it."""
        return self._disk is not None and self._disk.is_silent

    def begin(self, plan: StepPlan) -> None:
        """Drops what is called back, then carries out the moves; writes go on behind."""
        for number in plan.recalled:
            self._ahead.drop(number)
        self._behind.begin()
        for is_near, moves in groupby(plan.moves, self._stays_near):
            if is_near:
                copy_pages(self._layers, list(moves))
            else:
                for move in moves:
                    self._move(move)
        self._behind.flush()

    def fetch(self, fetches: Iterable[Fetch]) -> None:
        """Begins to bring units to the device."""
        for fetch in fetches:
            self._ahead.begin(fetch)

    def report(self, *, idle: bool = False) -> TierReport:
        """What is still on its way, and what was lost and moved since the last report; when `idle`,
        waits a moment for something to arrive.
        """
        pending = self._ahead.pending(seconds=IDLE_SECONDS if idle else 0.0)
        return TierReport(pending, *self._ledger.take())

    def place(self, group: int, unit: int) -> str:
        """`host` or `disk`."""
        return self._groups[group].place(unit)

    def layer_bytes(self, group: int, layer: int) -> int:
        """Bytes of one layer's part of a unit."""
        return self._groups[group].units.layer_sizes[layer]

    def submit(self, place: str, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Has a thread that reads from a place do something."""
        return self._ahead.submit(place, work, *arguments)

    def read_layer(self, group: int, unit: int, layer: int, buffer: Row) -> Row | None:
        """One layer's bytes of a unit outside the device, in `buffer` or where they lie; None when
        they cannot be had.
        """
        held = self._groups[group]
        span, place = held.spans[layer], held.place(unit)
        began = time.perf_counter()
        try:
            self._behind.settle((group, unit), OVERDUE_SECONDS)
            if place == HOST:
                data: Row = held.host_row(unit)[span]
            else:
                assert self._disk is not None, "a unit lies on a disk that is not there"
                data = buffer[: span.stop - span.start]
                self._disk.read(held.offset(unit) + span.start, [data])
            if not self._ledger.is_whole_layer((group, unit), layer, data):
                raise OSError(CHANGED)
        except (OSError, EnvironmentProblem, MemoryError) as error:
            self.lose(group, unit, str(error))
            return None
        self._ledger.count(place, data.nbytes, time.perf_counter() - began, inward=True)
        return data

    def lose(self, group: int, unit: int, reason: str) -> None:
        """Reports that a unit cannot be had."""
        self._ledger.lose((group, unit), f"{self.place(group, unit)}: {reason}")

    def close(self) -> None:
        """Ends all copies and removes the file; does not wait for a disk that is silent."""
        can_wait = not self.is_silent
        self._ahead.close(wait=can_wait)
        self._behind.close(wait=can_wait)
        if self._disk is not None:
            self._disk.close()

    def _stays_near(self, move: UnitCopy) -> bool:
        return move.target < self._groups[move.group].first

    def _move(self, move: UnitCopy) -> None:
        group, (source, target) = move.group, (move.source, move.target)
        held = self._groups[group]
        began = time.perf_counter()
        held.units.copy_summaries(source, target)
        try:
            if source >= held.first:
                self._spill(held, group, source=source, target=target)
            else:
                row = self._behind.row((group, target))
                held.units.read(source, row)
                self._behind.add((group, target), row)
        except (OSError, EnvironmentProblem, MemoryError) as error:
            self.lose(group, target, str(error))
            return
        if held.place(target) == HOST:
            self._ledger.count(HOST, held.unit_bytes, time.perf_counter() - began, inward=False)

    def _spill(self, held: GroupPlaces, group: int, *, source: int, target: int) -> None:
        """Host to disk: the digests go along, so that what changes in host memory shows."""
        self._behind.settle((group, source))
        digests = self._ledger.forget((group, source))
        row = self._behind.row((group, target))
        if digests is None:
            raise OSError("what was to be moved there was lost before")
        row[:] = held.host_row(source)
        self._behind.add((group, target), row, digests)
