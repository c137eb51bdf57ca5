"""Owns the comparison of a plan with what an engine measured, and the history kept of it.

Knows no engine: measurements are bytes by component name, as `MemoryMeasured` events carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from firstlight.errors import BadInput
from firstlight.planning.plan_file import PlanFile
from firstlight.units import format_bytes

TOLERANCE = 0.03
# Resident memory comes in pages, arenas and libraries: less than this is no difference of plans.
GRAIN_BYTES = 8 * 2**20
EXACT = ("weights", "kv", "recurrent")
SAMPLED = ("framework", "activations", "resident")
_FOLDER, _HISTORY, _COMPLETE = "audit", "starts.jsonl", "COMPLETE"


@dataclass(frozen=True)
class Compared:
    """One component of one rank: bytes planned and measured, None when a side has none."""

    component: str
    planned: int | None
    measured: int

    @property
    def error(self) -> float | None:
        """How far the plan is off, as a share of what was measured; positive: planned too much."""
        if self.planned is None or not self.measured:
            return None if self.planned is None else float(self.planned > 0)
        return (self.planned - self.measured) / self.measured

    @property
    def is_off(self) -> bool:
        """Whether the plan is off by more than the tolerance, or has no such component.

        What is read off resident memory must also be off by more than its grain.
        """
        if self.error is None:
            return True
        grain = GRAIN_BYTES if self.component.partition("/")[0] in SAMPLED else 0
        assert self.planned is not None
        return abs(self.error) > TOLERANCE and abs(self.planned - self.measured) > grain

    @property
    def text(self) -> str:
        """The comparison in words with its numbers."""
        if self.planned is None:
            return f"{self.component}: {format_bytes(self.measured)} measured, not in the plan"
        error = self.error or 0.0
        return (
            f"{self.component}: {format_bytes(self.planned)} planned, "
            f"{format_bytes(self.measured)} measured, {error:+.1%}"
        )


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One start in the history: when, under which layout, errors by component (null: unplanned),
    bytes measured."""

    at: float
    model: str
    fleet: str
    degrees: dict[str, int]
    errors: dict[str, float | None]
    measured: dict[str, int] = {}


def compare(plan: PlanFile, measured: Mapping[str, int]) -> tuple[Compared, ...]:
    """Returns every measured component beside its plan, those furthest off first."""
    found = [Compared(name, _planned(plan, name), size) for name, size in measured.items()]
    return tuple(sorted(found, key=lambda one: -abs(one.error if one.error is not None else 1e9)))


def _planned(plan: PlanFile, component: str) -> int | None:
    try:
        return plan.predicted_bytes(component)
    except BadInput:
        return None


def record(plan: PlanFile, compared: tuple[Compared, ...], at: float) -> AuditRecord:
    """Returns what the history keeps of a start; `at` is seconds since the epoch."""
    degrees = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp, "ep": plan.ep}
    errors = {one.component: one.error for one in compared}
    return AuditRecord(at=at, model=plan.model, fleet=plan.fleet, degrees=degrees, errors=errors)


def history_path(model: Path) -> Path | None:
    """Returns where the history of a store's starts is kept: in a folder that none of the store's
    digests covers. None for what is no store.
    """
    return model / _FOLDER / _HISTORY if (model / _COMPLETE).is_file() else None


def last_measured(history: Sequence[AuditRecord], prefix: str) -> int | None:
    """Returns the most that any rank of the newest start took of a component, None when no start
    measured it.
    """
    for entry in reversed(history):
        sizes = [size for name, size in entry.measured.items() if name.startswith(prefix)]
        if sizes:
            return max(sizes)
    return None


def append_history(path: Path, entry: AuditRecord) -> None:
    """Adds a line to the history, a file of one JSON record a line."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(entry) + b"\n")


def read_history(path: Path) -> tuple[AuditRecord, ...]:
    """Returns the starts recorded, oldest first; none when there is no file.

    Raises BadInput naming the line that is no record.
    """
    if not path.exists():
        return ()
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entries.append(msgspec.json.decode(line, type=AuditRecord))
        except msgspec.DecodeError as error:
            raise BadInput(f"{path}, line {number}: no audit record: {error}") from error
    return tuple(entries)
