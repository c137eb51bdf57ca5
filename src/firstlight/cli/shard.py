"""Owns the verb `shard`: flags in, progress and report out; the conversion is adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

Source = Annotated[
    Path, typer.Argument(help="checkpoint folder, or a safetensors, .bin or GGUF file")
]
Store = Annotated[Path, typer.Argument(help="directory to make, or to finish", show_default=False)]
Codec = Annotated[
    str, typer.Option(help="keep, fp32, bf16, fp16, int8, int4, fp8, fp8-block or mxfp4")
]


Budget = Annotated[
    float,
    typer.Option(
        help="share (0 to 1) of the bytes quantising saves, given up for the worst layers"
    ),
]
Sample = Annotated[Path | None, typer.Option(help="text to measure layers on (else a bundled one)")]


def shard(
    source: Source,
    store: Store,
    dtype: Codec = "keep",
    precision_budget: Budget = 0.0,
    sample: Sample = None,
    as_json: AsJson = False,
) -> int:
    """Make the portable store of a checkpoint.

    Reads the source once and never writes to it; a run that was killed resumes where it stopped.
    """
    from firstlight.cli.progress import progress_on_stderr
    from firstlight.platforms.torch_check import require_torch

    require_torch()
    from firstlight.accept.convert import convert
    from firstlight.accept.weight_reports import shard_report

    with progress_on_stderr() as progress:
        made = convert(
            source,
            store,
            dtype=dtype,
            budget=precision_budget,
            sample=_text(sample),
            progress=progress,
        )
    return show(shard_report(made), as_json=as_json)


def _text(path: Path | None) -> str:
    from firstlight.errors import UsageError

    if path is None:
        return ""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text: {error}") from error
