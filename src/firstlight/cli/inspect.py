"""Owns the verb `inspect`: a path in, a report out; what is looked at is adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

Target = Annotated[Path, typer.Argument(help="checkpoint folder, GGUF file or store")]


def inspect(path: Target, as_json: AsJson = False) -> int:
    """Say what a checkpoint is and whether it is whole.

    Reads config and headers only: parts, dtypes, licence, and every tensor that is missing,
    unexpected, truncated or of another shape than the config says.
    """
    from firstlight.accept.weight_reports import inspect_report
    from firstlight.adapt.inspect import inspect_path

    return show(inspect_report(inspect_path(path)), as_json=as_json)
