"""Owns what one rank knows of units outside the device: their checksums, losses and traffic.

Knows no place and takes no decision. Any thread may call.
"""

import threading
from collections import Counter
from collections.abc import Sequence

from blake3 import blake3

from firstlight.runner.unit_bytes import Row
from firstlight.schedule.step import LostUnit, TierFlow

DIGEST_BYTES = 16

# Group and number.
Unit = tuple[int, int]


class UnitLedger:
    """Checksums by unit, and what happened since the last report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[Unit, list[bytes]] = {}
        self._lost: dict[Unit, str] = {}
        self._bytes: Counter[tuple[str, bool]] = Counter()
        self._seconds: dict[tuple[str, bool], float] = {}

    def keep(self, unit: Unit, digests: list[bytes]) -> None:
        """Notes the checksums of a unit's layers."""
        self._digests[unit] = digests

    def forget(self, unit: Unit) -> list[bytes] | None:
        """Takes the checksums of a unit out; None when there are none."""
        return self._digests.pop(unit, None)

    def is_whole(self, unit: Unit, row: Row, spans: Sequence[slice]) -> bool:
        """Whether a row has the bytes that were written."""
        digests = self._digests.get(unit)
        return digests is not None and row_digests(row, spans) == digests

    def is_whole_layer(self, unit: Unit, layer: int, data: Row) -> bool:
        """Whether one layer's part of a row has the bytes that were written."""
        digests = self._digests.get(unit)
        return digests is not None and _digest(data) == digests[layer]

    def lose(self, unit: Unit, reason: str) -> None:
        """Notes that a unit cannot be had."""
        with self._lock:
            self._digests.pop(unit, None)
            self._lost[unit] = reason

    def count(self, place: str, size: int, seconds: float, *, inward: bool) -> None:
        """Counts bytes that were moved."""
        with self._lock:
            self._bytes[place, inward] += size
            self._seconds[place, inward] = self._seconds.get((place, inward), 0.0) + seconds

    def take(self) -> tuple[list[LostUnit], list[TierFlow]]:
        """What was lost and moved since the last call."""
        with self._lock:
            lost = [LostUnit(*unit, reason) for unit, reason in self._lost.items()]
            flows = [TierFlow(*k, size, self._seconds[k]) for k, size in self._bytes.items()]
            self._lost, self._bytes, self._seconds = {}, Counter(), {}
        return lost, flows


def row_digests(row: Row, spans: Sequence[slice]) -> list[bytes]:
    """Returns the checksum of each layer's part of a row."""
    return [_digest(row[span]) for span in spans]


def _digest(data: Row) -> bytes:
    return blake3(data.data).digest(DIGEST_BYTES)
