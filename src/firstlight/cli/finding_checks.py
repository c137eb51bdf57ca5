"""Owns how findings about weights become checks of a report; knows no verb."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstlight.accept.report import Check, Status
    from firstlight.checkpoint.findings import Finding

_STATUS: dict[str, Status] = {"error": "fail", "warning": "warn", "note": "ok"}


def checks_of(findings: Iterable[Finding]) -> tuple[Check, ...]:
    """One check for each finding: an error fails, a warning warns, a note is only told."""
    from firstlight.accept.report import Check

    return tuple(
        Check(finding.where, _STATUS[finding.severity], finding.what, finding.fix)
        for finding in findings
    )
