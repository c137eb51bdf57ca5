"""Owns the verb `inspect`: a path in, a report out; what is looked at is adapt's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Report, Section
    from firstlight.adapt.inspect import InspectReport

Target = Annotated[Path, typer.Argument(help="checkpoint folder, GGUF file or store")]


def inspect(path: Target, as_json: AsJson = False) -> int:
    """Say what a checkpoint is and whether it is whole.

    Reads config and headers only: parts, dtypes, licence, and every tensor that is missing,
    unexpected, truncated or of another shape than the config says.
    """
    from firstlight.adapt.inspect import inspect_path

    return show(inspect_report(inspect_path(path)), as_json=as_json)


def inspect_report(found: InspectReport) -> Report:
    """Turns what was found into the report the command shows; an error in it fails the report."""
    import msgspec

    from firstlight.accept.report import Check, Report
    from firstlight.cli.finding_checks import checks_of

    checks = checks_of(found.findings)
    if found.sound:
        checks = (Check("weights are whole and known", "ok", found.family), *checks)
    data: dict[str, Any] = {**msgspec.to_builtins(found, enc_hook=str, str_keys=True)}
    return Report("firstlight inspect", (_model(found), _sizes(found)), checks, data)


def _model(found: InspectReport) -> Section:
    from firstlight.accept.report import Section
    from firstlight.units import format_bytes, format_count

    degrees = ", ".join(str(degree) for degree in found.legal_tp) or "unknown"
    facts: Mapping[str, object] = {
        "path": found.path,
        "format": f"{found.format}, {found.num_files} files",
        "family": f"{found.family or 'unknown'} ({found.model_type or 'no model_type'})",
        "layers": format_count(found.num_layers),
        "context": f"{format_count(found.context_length)} tokens",
        "vocabulary": format_count(found.vocab_size) + (", tied" if found.tied else ""),
        "parameters": format_count(found.parameters),
        "stored": f"{format_count(found.num_tensors)} tensors, {format_bytes(found.num_bytes)}",
        "quantised": found.quantisation or "no",
        "licence": found.licence or "not stated",
        "legal TP": degrees,
    }
    return Section("model", tuple(f"{name:<12}{value}" for name, value in facts.items()))


def _sizes(found: InspectReport) -> Section:
    from firstlight.accept.report import Section
    from firstlight.units import format_bytes

    parts = [("parameters", name, count, None) for name, count in found.parameters_by_part.items()]
    dtypes = [
        ("stored as", name, found.tensors_by_dtype.get(name), format_bytes(num_bytes))
        for name, num_bytes in found.bytes_by_dtype.items()
    ]
    columns = ("by", "name", "count", "bytes")
    return Section("parts", columns=columns, rows=(*parts, *dtypes))
