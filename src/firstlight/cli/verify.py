"""Owns the verb `verify`: a store in, numbered steps out; the checks are adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Report
    from firstlight.adapt.verify import VerifyReport

Store = Annotated[Path, typer.Argument(help="directory that `shard` made")]


def verify(store: Store, as_json: AsJson = False) -> int:
    """Prove that a store is whole, byte for byte.

    Reads everything: sizes, coverage of the source, the digest of every granule and file.
    """
    from firstlight.adapt.verify import verify_store
    from firstlight.cli.progress import progress_on_stderr

    with progress_on_stderr() as progress:
        verified = verify_store(store, progress=progress)
    return show(verify_report(verified), as_json=as_json)


def verify_report(verified: VerifyReport) -> Report:
    """Turns the steps into the report the command shows; any finding fails its step."""
    from firstlight.accept.report import Check, Report, Section
    from firstlight.cli.finding_checks import checks_of

    steps = tuple(
        Check(f"{step.number}. {step.title}", "ok" if step.passed else "fail", step.summary)
        for step in verified.steps
    )
    section = Section(str(verified.path), checks=steps)
    data = {
        "store": str(verified.path),
        "passed": verified.passed,
        "steps": [
            {"title": step.title, "passed": step.passed, "summary": step.summary}
            for step in verified.steps
        ],
    }
    return Report("firstlight verify", (section,), checks_of(verified.findings), data)
