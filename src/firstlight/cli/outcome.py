"""Owns how a finished report leaves the process: as text or JSON on stdout, and an exit code.

Knows no verb; what a report says was decided before it comes here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstlight.accept.report import Report


def show(report: Report, *, as_json: bool) -> int:
    """Prints the report and returns its exit code: 0 when all checks hold, 1 when one failed."""
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
        return report.exit_code
    from rich.console import Console

    from firstlight.accept.report import print_report

    print_report(report, Console(highlight=False))
    return report.exit_code
