"""Owns the verb `shard`: flags in, progress and report out; the conversion is adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Report
    from firstlight.adapt.shard import ShardReport

Source = Annotated[Path, typer.Argument(help="checkpoint folder, or a GGUF or safetensors file")]
Store = Annotated[Path, typer.Argument(help="directory to make, or to finish", show_default=False)]
Codec = Annotated[str, typer.Option(help="keep, fp32, bf16 or fp16")]


def shard(source: Source, store: Store, dtype: Codec = "keep", as_json: AsJson = False) -> int:
    """Make the portable store of a checkpoint.

    Reads the source once and never writes to it; a run that was killed resumes where it stopped.
    """
    from firstlight.cli.progress import progress_on_stderr
    from firstlight.platforms.torch_check import require_torch

    require_torch()
    from firstlight.accept.convert import convert

    with progress_on_stderr() as progress:
        made = convert(source, store, dtype=dtype, progress=progress)
    return show(shard_report(made), as_json=as_json)


def shard_report(made: ShardReport) -> Report:
    """Turns what a conversion did into the report the command shows."""
    from firstlight.accept.report import Check, Report, Section
    from firstlight.units import format_bytes, format_count

    manifest = made.manifest
    coverage = manifest.coverage
    num_bytes = sum(unit.size for unit in manifest.units)
    state = "was complete already" if made.already_complete else "is complete"
    lines = (
        f"{made.path} {state}",
        f"from {manifest.source.name} ({manifest.source.format}), kept as {manifest.codec}",
        f"{len(manifest.units)} units, {format_bytes(num_bytes)}; "
        f"{made.resumed_units} of them from an earlier run",
        f"licence of the weights: {manifest.licence or 'not stated'}",
    )
    covered = Check(
        "every source value is stored once",
        "ok",
        f"{format_count(coverage.tensors)} tensors, {format_count(coverage.values)} values",
    )
    data = {
        "store": str(made.path),
        "units": len(manifest.units),
        "bytes": num_bytes,
        "resumed_units": made.resumed_units,
        "already_complete": made.already_complete,
        "source_digest": manifest.source.content_digest,
        "codec": manifest.codec,
        "licence": manifest.licence,
    }
    return Report("firstlight shard", (Section("store", lines, checks=(covered,)),), data=data)
