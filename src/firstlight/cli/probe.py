"""Owns the verb `probe`: what this machine has, which kernels it would use, what is missing.

Knows which parts to ask; how they find out is theirs.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Check, Report, Section
    from firstlight.platforms.spec import DeviceSpec

Device = Annotated[str, typer.Option(help="platform to look at (auto, cpu, ...)")]
Dtype = Annotated[str, typer.Option(help="type of weights the kernels are chosen for")]


def probe(device: Device = "cpu", dtype: Dtype = "float32", as_json: AsJson = False) -> int:
    """Show devices, memory, versions and kernels."""
    return show(probe_report(device, dtype), as_json=as_json)


def probe_report(device: str, dtype: str) -> Report:
    """Looks at the machine; raises UsageError for an unknown platform."""
    from firstlight.accept.report import Report
    from firstlight.platforms.find import find_platform

    found = find_platform(device)
    specs = [found.spec(index) for index in range(found.count())]
    versions, kernels = _versions(), _kernels(specs[0], dtype)
    data = {
        "devices": [_device_data(spec) for spec in specs],
        "kernels": {str(row[0]): row[1] for row in kernels.rows},
    }
    return Report("firstlight probe", (_devices(specs), versions, kernels), data=data)


def _devices(specs: list[DeviceSpec]) -> Section:
    from firstlight.accept.report import Section
    from firstlight.units import format_bytes

    rows = tuple(
        (
            f"{spec.kind}:{spec.index}",
            spec.name,
            spec.cores,
            format_bytes(spec.memory.total_bytes),
            format_bytes(spec.memory.available_bytes),
        )
        for spec in specs
    )
    notes = tuple(f"{spec.kind}:{spec.index}: {note}" for spec in specs for note in spec.notes)
    columns = ("device", "name", "cores", "memory", "available")
    return Section("devices", lines=notes, columns=columns, rows=rows)


def _versions() -> Section:
    from firstlight.accept.report import Check, Section
    from firstlight.platforms.torch_check import torch_problem, torch_version
    from firstlight.platforms.versions import PYTHON, TORCH, at_least

    found = platform.python_version()
    fits = at_least(found, PYTHON.minimum)
    python = Check(
        f"python {PYTHON.minimum} or newer",
        "ok" if fits else "fail",
        f"{found}; tested with {PYTHON.tested}",
        f"use Python {PYTHON.tested}",
    )
    problem = torch_problem()
    detail = problem or f"{torch_version()}; tested with {TORCH.tested}"
    torch = Check(f"torch {TORCH.minimum} or newer", "fail" if problem else "ok", detail)
    return Section("versions", checks=(python, torch))


def _kernels(spec: DeviceSpec, dtype: str) -> Section:
    from firstlight.accept.report import Check, Section
    from firstlight.platforms.torch_check import torch_problem

    if torch_problem() is not None:
        unknown = Check("kernels chosen", "unknown", "cannot be known without torch")
        return Section("kernels", checks=(unknown,))
    from firstlight.kernels.builtin import builtin_kernels
    from firstlight.kernels.registry import KernelQuery

    query = KernelQuery(platform=spec.kind, dtype=dtype, cpu_features=spec.cpu_features)
    choices = builtin_kernels().resolve(query).choices
    rows = tuple(
        (
            choice.operation,
            choice.kernel.name,
            "; ".join(f"{name} {reason}" for name, reason in choice.passed_over) or None,
        )
        for choice in choices
    )
    slow = [choice.operation for choice in choices if choice.kernel.name == "reference"]
    return Section(
        f"kernels for {dtype}",
        columns=("operation", "kernel", "passed over"),
        rows=rows,
        checks=(_speed_check(slow, len(choices)),),
    )


def _speed_check(slow: list[str], total: int) -> Check:
    from firstlight.accept.report import Check

    name = "fast kernels"
    if not slow:
        return Check(name, "ok", f"{total} operations")
    detail = f"{len(slow)} of {total} operations run on the plain reference: {', '.join(slow)}"
    return Check(name, "warn", detail, "python -m firstlight.kernels.build")


def _device_data(spec: DeviceSpec) -> dict[str, object]:
    return {
        "kind": spec.kind,
        "index": spec.index,
        "name": spec.name,
        "cores": spec.cores,
        "total_bytes": spec.memory.total_bytes,
        "available_bytes": spec.memory.available_bytes,
        "capabilities": sorted(spec.capabilities),
        "cpu_features": sorted(spec.cpu_features),
        "notes": list(spec.notes),
    }
