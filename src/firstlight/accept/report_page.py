"""Owns the report of `up` as one HTML file: pictures inside, drawings as SVG, nothing from outside.

Knows nothing of how a layer came to its verdict; it shows what the report holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from firstlight.accept.report import Report, format_cell
from firstlight.accept.samples import picture_url
from firstlight.errors import EnvironmentProblem
from firstlight.units import format_bytes

_TEMPLATE = "report_page.html.jinja"
_LONGEST_PROMPT = 400
_LONG_PROMPT_LINES = 8  # prompts of more lines are shown in two columns
CHART_WIDTH, ROW_HEIGHT, LABEL_WIDTH = 900, 20, 300


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart: where it lies in SVG units, and what is written beside it."""

    label: str
    text: str
    kind: str
    x: float
    y: float
    width: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question with its pictures (data URLs) and what came back; `verdict` is empty where no
    right answer is known.
    """

    prompt: str
    pictures: tuple[str, ...]
    tool_result: str
    reasoning: str
    calls: tuple[str, ...]
    answer: str
    verdict: str


def write_page(report: Report, path: Path) -> None:
    """Writes the report as one HTML file; raises EnvironmentProblem where it cannot."""
    text = render_page(report)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error) from error


def require_writable(path: Path) -> None:
    """Makes the page's folder and raises EnvironmentProblem where the page could not be written:
    known before the work whose report it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{path}: the report cannot be written there ({error.strerror}); name another file"
    )


def render_page(report: Report) -> str:
    """The report as HTML. What it holds is escaped; equal reports give equal pages."""
    source = (resources.files(__package__ or "") / _TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = format_cell
    serve = report.data.get("serve") or {}
    smoke = report.data.get("smoke") or {}
    asked = report.data.get("ask") or {}
    return environment.from_string(source).render(
        report=report,
        exchanges=[
            *_exchanges(smoke.get("answers") or ()),
            *(_exchange(row) for row in asked.get("answers") or ()),
        ],
        phases=_phases((serve.get("startup") or {}).get("phases") or ()),
        memory=_memory(serve.get("memory") or ()),
        long_prompt_lines=_LONG_PROMPT_LINES,
        row_height=ROW_HEIGHT,
        label_width=LABEL_WIDTH,
        chart_width=CHART_WIDTH,
    )


def _exchanges(rows: Sequence[Mapping[str, Any]]) -> list[Exchange]:
    """Those the profile wants shown, then whatever was answered wrongly."""
    chosen = [row for row in rows if row["shown"] or row["right"] is False]
    return [_exchange(row) for row in chosen]


def _exchange(row: Mapping[str, Any]) -> Exchange:
    half = _LONGEST_PROMPT // 2
    prompt = str(row["prompt"])
    if len(prompt) > _LONGEST_PROMPT:
        prompt = f"{prompt[:half]}\n[{len(prompt) - 2 * half} characters]\n{prompt[-half:]}"
    return Exchange(
        prompt,
        tuple(picture_url(name) for name in row.get("images", ())),
        row.get("tool_result", ""),
        row["reasoning"],
        tuple(f"{call['name']}({call['arguments']})" for call in row["calls"]),
        row["text"],
        {True: "ok", False: "fail", None: "unknown", "": ""}[row.get("right", "")],
    )


def _phases(phases: Sequence[Mapping[str, Any]]) -> list[Bar]:
    spans = [
        (f"{p['parent'] or ''} {p['name']}".strip(), float(p["began"]), float(p["ended"] or 0))
        for p in phases
    ]
    longest = max((max(began, ended) for _, began, ended in spans), default=0.0) or 1.0
    return [
        _bar(row, label, f"{max(0.0, ended - began):.2f} s", "phase", (began, ended), longest)
        for row, (label, began, ended) in enumerate(sorted(spans, key=lambda span: span[1]))
    ]


def _memory(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Two bars for each component: planned, measured. Lengths grow with the square root, so that
    small components are seen beside large ones.
    """
    sizes = [max(row["planned"], row["measured"]) for row in rows]
    longest = math.sqrt(max(sizes, default=0)) or 1.0
    bars = []
    for number, row in enumerate(sorted(rows, key=lambda row: -int(row["measured"]))):
        for place, kind in enumerate(("planned", "measured")):
            label = str(row["component"]) if place == 0 else ""
            end = math.sqrt(row[kind])
            text = f"{kind} {format_bytes(row[kind])}"
            bars.append(_bar(2 * number + place, label, text, kind, (0.0, end), longest))
    return bars


def _bar(
    row: int, label: str, text: str, kind: str, span: tuple[float, float], longest: float
) -> Bar:
    scale = (CHART_WIDTH - LABEL_WIDTH - 140) / longest
    began, ended = span
    width = max(1.0, (ended - began) * scale)
    return Bar(
        label, text, kind, round(LABEL_WIDTH + began * scale, 1), row * ROW_HEIGHT, round(width, 1)
    )
