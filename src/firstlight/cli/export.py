"""Owns the verb `export`: a store in, safetensors out; the writing is adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Report
    from firstlight.adapt.export import ExportReport

Store = Annotated[Path, typer.Argument(help="directory that `shard` made")]
Target = Annotated[Path, typer.Argument(help="new or empty directory", show_default=False)]


def export(store: Store, target: Target, as_json: AsJson = False) -> int:
    """Turn a store back into safetensors.

    Bit for bit what was published, where `shard` cast nothing; digests are checked on the way.
    """
    from firstlight.adapt.export import export_store
    from firstlight.cli.progress import progress_on_stderr

    with progress_on_stderr() as progress:
        made = export_store(store, target, progress=progress)
    return show(export_report(made), as_json=as_json)


def export_report(made: ExportReport) -> Report:
    """Turns what was written into the report the command shows; a cast dtype is a warning."""
    from firstlight.accept.report import Check, Report, Section
    from firstlight.units import format_bytes, format_count

    line = (
        f"{format_count(made.tensors)} tensors, {format_bytes(made.num_bytes)} in "
        f"{len(made.files)} files"
    )
    name = "values are the source's, bit for bit"
    check = Check(name, "ok")
    if made.cast:
        shown = ", ".join(made.cast[:8]) + (" ..." if len(made.cast) > 8 else "")
        check = Check(name, "warn", f"the store holds casts of: {shown}")
    data = {
        "target": str(made.path),
        "files": list(made.files),
        "tensors": made.tensors,
        "bytes": made.num_bytes,
        "cast": list(made.cast),
    }
    return Report("firstlight export", (Section(str(made.path), (line,)),), (check,), data)
