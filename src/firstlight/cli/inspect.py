"""Owns the verb `inspect`: a path in, a report out; what is looked at is adapt's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Check, Report
    from firstlight.checkpoint.shard_map import ShardMap
    from firstlight.sharding.layout import Layout

Target = Annotated[Path, typer.Argument(help="checkpoint folder, GGUF file or store")]
Cut = Annotated[str, typer.Option("--layout", help="also map bytes to ranks: tp=8,pp=2,ep=8,dp=1")]


def inspect(path: Target, layout: Cut = "", as_json: AsJson = False) -> int:
    """Say what a checkpoint is and whether it is whole.

    Reads config and headers only: parts, dtypes, licence, and every tensor that is missing,
    unexpected, truncated or of another shape than the config says. With --layout also which bytes
    each rank takes, and the proof that none is left out.
    """
    from firstlight.accept.weight_reports import inspect_report
    from firstlight.adapt.inspect import inspect_path, map_path

    degrees = _degrees(layout)
    found = inspect_path(path)
    report = inspect_report(found)
    if degrees is not None and found.sound:
        report = with_map(report, map_path(path, degrees))
    return show(report, as_json=as_json)


def _degrees(text: str) -> Layout | None:
    from firstlight.errors import UsageError
    from firstlight.sharding.layout import Layout

    if not text:
        return None
    degrees = {}
    for item in text.split(","):
        name, _, value = item.strip().lower().partition("=")
        if name not in ("tp", "pp", "dp", "ep") or not value.isdecimal():
            raise UsageError(f"--layout {text!r}: {item!r} is not like tp=8 (tp, pp, dp, ep)")
        degrees[name] = int(value)
    return Layout(**degrees)


def with_map(report: Report, made: ShardMap) -> Report:
    """Adds what each rank takes, and whether every byte goes somewhere, to a report."""
    from dataclasses import replace

    from firstlight.accept.report import Section
    from firstlight.units import format_bytes

    rows = tuple(
        (share.rank, share.tensors, format_bytes(share.num_bytes), format_bytes(share.shared_bytes))
        for share in made.shares
    )
    columns = ("rank", "tensors", "takes", "of it shared")
    section = Section("what each rank takes", columns=columns, rows=rows, checks=_proof(made))
    data = {**report.data, "ranks": [vars(share) for share in made.shares]}
    return replace(report, sections=(*report.sections, section), data=data)


def _proof(made: ShardMap) -> tuple[Check, ...]:
    from firstlight.accept.report import Check
    from firstlight.units import format_bytes

    uncovered, goes = made.uncovered(), made.source_bytes()
    detail = (
        f"{format_bytes(goes.once)} to one rank, {format_bytes(goes.shared)} to several, "
        f"{format_bytes(goes.unused)} unused"
    )
    name = "every byte is taken"
    if uncovered:
        return (Check(name, "fail", f"left out: {', '.join(uncovered[:20])}"),)
    return (Check(name, "ok", detail),)
