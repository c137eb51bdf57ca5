"""Owns the part of the planner's errors that comes from runs on one machine, as Markdown.

Reads what `benchmarks/planner.py judge --write` kept; measures nothing itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.accept.report import format_cell
from firstlight.planning.explain import milli

MEASURED = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "planner.json"
MACHINE_HEAD = """## A running engine on one machine

Made by `python benchmarks/planner.py` (`measure`, then `judge --write`; {machine}). Each load was
served by an engine of its own. Figures of the machine - what its memory and its products reach, the
least time of a kernel, the engine's work for a step, a sequence and a request - were fitted to six
other loads; the loads below were predicted from these, by walking through the engine's steps.
Errors are shares of what was measured: predicted 100 and measured 80 is +25 %.

* `weights`, `packed`, `kv`, `recurrent`: what ranks allocated, beside the plan.
* `activations`: the tensors of the largest step at their peak, each in pages of its own (on a host
  a heap keeps holes, which no plan knows; every second measured step runs so).
* `framework`: interpreter, libraries and what kernels keep, as the start before measured it.
* `resident`: the most the process held in the largest step, its heap as it is.
"""
SPEED_HEAD = """## What the planner itself takes

Whole commands on the real Kimi K3, interpreter and imports included (`planner.py speed`).
"""


def table(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for row in rows:
        cells = (c if isinstance(c, str) else format_cell(c) for c in row)  # type: ignore[arg-type]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def machine_lines() -> list[str]:
    """Returns the comparison with a running engine, if the benchmark has left one."""
    if not MEASURED.exists():
        return []
    data = json.loads(MEASURED.read_text(encoding="utf-8"))
    spent = [
        (one["name"], f"{one['seconds']:.1f} s", f"{one['bytes'] / 2**20:,.0f} MiB")
        for one in data["speed"]
    ]
    lines = [SPEED_HEAD, *table(("command", "time", "memory"), spent), ""]
    lines.append(MACHINE_HEAD.format(machine=data["machine"]))
    for model in data["models"]:
        errors: list[tuple[object, ...]] = [
            (name, *(f"{found[rank]:.1%}" for rank in ("median", "p90", "worst")))
            for name, found in model["errors"].items()
        ]
        lines += [
            f"### {model['name']}",
            "",
            *table(("metric", "median error", "p90", "worst"), errors),
            "",
            *table(
                (
                    *("load", "TTFT", "predicted", "TPOT", "predicted"),
                    *("activations", "predicted", "resident", "predicted"),
                ),
                [_machine_row(row) for row in model["rows"]],
            ),
            "",
        ]
    return lines


def _machine_row(row: dict[str, Any]) -> tuple[object, ...]:
    shape, measured, predicted = row["shape"], row["measured"], row["predicted"]
    cells: list[object] = [
        f"{shape['prompt']} in, {shape['output']} out, {shape['concurrency']} at once"
    ]
    for name in ("ttft", "tpot"):
        cells += [milli(measured[name]), milli(predicted[name])]
    for name, unit, digits in (("activations", 2**10, "KiB"), ("resident", 2**20, "MiB")):
        held = (measured.get(name, 0), predicted.get(name, 0))
        cells += [f"{size / unit:,.0f} {digits}" for size in held]
    return tuple(cells)
