"""Owns how what was found out about weights becomes the reports people read; finds nothing out
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.accept.report import Check, Report, Section, Status
from firstlight.units import format_bytes, format_count

if TYPE_CHECKING:
    from firstlight.adapt.inspect import InspectReport
    from firstlight.adapt.shard import ShardReport
    from firstlight.adapt.verify import VerifyReport
    from firstlight.checkpoint.findings import Finding

_STATUS: dict[str, Status] = {"error": "fail", "warning": "warn", "note": "ok"}


def checks_of(findings: Iterable[Finding]) -> tuple[Check, ...]:
    """One check for each finding: an error fails, a warning warns, a note is only told."""

    return tuple(
        Check(finding.where, _STATUS[finding.severity], finding.what, finding.fix)
        for finding in findings
    )


def inspect_report(found: InspectReport) -> Report:
    """Turns what was found into the report the command shows; an error in it fails the report."""
    checks = checks_of(found.findings)
    if found.sound:
        seen = (
            "names are known, files are absent" if found.computed else "weights are whole and known"
        )
        checks = (Check(seen, "ok", found.family), *checks)
    data: dict[str, Any] = {**msgspec.to_builtins(found, enc_hook=str, str_keys=True)}
    return Report("firstlight inspect", (_model(found), _sizes(found)), checks, data)


def _model(found: InspectReport) -> Section:
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
    parts = [("parameters", name, count, None) for name, count in found.parameters_by_part.items()]
    dtypes = [
        ("stored as", name, found.tensors_by_dtype.get(name), format_bytes(num_bytes))
        for name, num_bytes in found.bytes_by_dtype.items()
    ]
    columns = ("by", "name", "count", "bytes")
    return Section("parts", columns=columns, rows=(*parts, *dtypes))


def shard_report(made: ShardReport) -> Report:
    """Turns what a conversion did into the report the command shows."""
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


def verify_report(verified: VerifyReport) -> Report:
    """Turns the steps into the report the command shows; any finding fails its step."""
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
