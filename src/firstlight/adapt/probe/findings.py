"""Owns what one check of a machine says: what was found, how sure that is, and what to do.

Knows no presentation. No check holds on a fact that is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from firstlight.platforms.machine import FactUnknown

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
STATUSES = (OK, WARN, FAIL, UNKNOWN)


@dataclass(frozen=True)
class Finding:
    """One thing looked at by check number `check`; what does not hold says how to fix it."""

    check: int
    name: str
    status: str
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status
        assert self.status == OK or self.fix, f"{self.name}: {self.status} without a fix"


@dataclass(frozen=True)
class Looking:
    """Makes the findings of one check, so that number and name are said once."""

    check: int
    name: str

    def ok(self, detail: str) -> Finding:
        """It holds."""
        return Finding(self.check, self.name, OK, detail)

    def warn(self, detail: str, fix: str) -> Finding:
        """It works, but not as well as it could, or nobody has proven it."""
        return Finding(self.check, self.name, WARN, detail, fix)

    def fail(self, detail: str, fix: str) -> Finding:
        """It does not hold."""
        return Finding(self.check, self.name, FAIL, detail, fix)

    def unknown(self, detail: str, fix: str) -> Finding:
        """It could not be found out."""
        return Finding(self.check, self.name, UNKNOWN, detail, fix)


def words_of(error: Exception) -> str:
    """Returns the first line of an error, at most 200 characters; its type when it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def judged(look: Looking, fix: str, judge: Callable[[Looking], Iterable[Finding]]) -> list[Finding]:
    """Returns what `judge` finds. Where a fact it needs is unknown, that is the finding, with the
    way to find it out.
    """
    found: list[Finding] = []
    findings: Iterator[Finding] = iter(judge(look))
    while True:
        try:
            found.append(next(findings))
        except StopIteration:
            return found
        except FactUnknown as unknown:
            return [*found, look.unknown(str(unknown), fix)]
