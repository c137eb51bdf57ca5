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
* `activations`: the tensors of the largest step at their peak, counted as operations make them.
* `framework`: interpreter, libraries and what kernels keep, as the start before measured it.
* `resident`: the most the process held in the largest step, with the holes of its heap, which no
  plan knows.

Clients and the process that reads requests and writes tokens share the other core. Requests are
predicted as read one after the other; that tokens wait meanwhile is not, which shows where a step
takes a few milliseconds and many clients ask.

What bounds the times: single runs of nearly equal loads differ (SmolLM2 with 32 and 48 tokens in:
11.9 and 15.5 ms a token), and the largest errors are those of k3-mini with 8 at once, where one
process reads a burst of requests while it writes tokens. A further figure, the rate caches are read
at, takes the ninth decile of SmolLM2's TPOT from 29 to 26 % and was left out. `plan` itself ranks
layouts by a closed form, which is further off where requests wait for one another: 43 and 59 % at
the median of TTFT on these loads, 12 and 24 % of TPOT.
"""
RANKS = ("median", "p90", "worst")
# Metrics, what is asked of them, and the ranks of errors it is asked at.
GOALS = (
    (("activations", "resident"), (("median", 0.05), ("worst", 0.10))),
    (("ttft", "tpot"), (("median", 0.10), ("p90", 0.20))),
)
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
            (
                name,
                *(f"{found[rank]:.1%}" for rank in ("median", "p90", "worst")),
                _asked(name, found),
            )
            for name, found in model["errors"].items()
        ]
        lines += [
            f"### {model['name']}",
            "",
            *table(("metric", "median error", "p90", "worst", "asked"), errors),
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


def _asked(name: str, found: dict[str, float]) -> str:
    """What is asked of a metric, and whether the errors keep it."""
    for names, limits in GOALS:
        if name in names:
            text = ", ".join(f"{rank} {most:.0%}" for rank, most in limits)
            kept = all(found[rank] <= most for rank, most in limits)
            return f"{text}: {'kept' if kept else 'missed'}"
    return ""


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
