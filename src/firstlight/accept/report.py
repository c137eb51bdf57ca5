"""Owns the report every verb ends with: checks, tables, steps, data and the verdict over them.

Knows nothing of what was checked or measured; the object comes first, printing it second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Status = Literal["ok", "warn", "fail", "unknown"]
Cell = str | int | float | bool | None

STATUSES: tuple[Status, ...] = ("ok", "warn", "fail", "unknown")
_STYLES: dict[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "cyan"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `detail` says what was found, `fix` what to do about it."""

    name: str
    status: Status
    detail: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One titled part of a report: free lines, numbered steps, a table and checks of its own."""

    title: str
    lines: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (
            f"section {self.title!r}: a row has another length than its {len(self.columns)} columns"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What a verb found; `data` is for programs and must hold only what JSON can hold."""

    title: str
    sections: tuple[Section, ...] = ()
    checks: tuple[Check, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """The report's own checks, then those of each section in order."""
        return self.checks + tuple(check for part in self.sections for check in part.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not hold."""
        return tuple(check for check in self.all_checks if check.status == "fail")

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings and unknowns do not fail a report."""
        return not self.failed

    @property
    def exit_code(self) -> int:
        """0 when every check holds, 1 when one failed."""
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """Writes the whole report as indented JSON; equal reports give equal text.

        Keys of `data` are sorted. Infinities and NaN, which JSON does not have, become null.
        """
        plain = {
            "title": self.title,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "checks": msgspec.to_builtins(self.checks),
            "sections": msgspec.to_builtins(self.sections),
            "data": _sorted(msgspec.to_builtins(dict(self.data), str_keys=True)),
        }
        return json.dumps(_finite(plain), indent=2, ensure_ascii=True, allow_nan=False)


def print_report(report: Report, console: Console) -> None:
    """Writes the report for people: title, sections, checks, then one line with the verdict."""
    console.print(f"[bold]{escape(report.title)}[/bold]", highlight=False)
    for section in report.sections:
        _print_section(section, console)
    if report.checks:
        console.print()
        _print_checks(report.checks, console)
    if report.all_checks:
        console.print()
        console.print(_verdict(report), highlight=False)


def format_cell(value: Cell) -> str:
    """Writes one table cell: `-` for None, separators in integers, four digits of a fraction."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return value


def _print_section(section: Section, console: Console) -> None:
    console.print()
    if section.title:
        console.print(f"[bold]{escape(section.title)}[/bold]", highlight=False)
    for line in section.lines:
        console.print(f"  {escape(line)}", highlight=False)
    for number, step in enumerate(section.steps, start=1):
        console.print(f"  {number}. {escape(step)}", highlight=False)
    if section.columns:
        console.print(_table(section.columns, section.rows))
    if section.checks:
        _print_checks(section.checks, console)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    table = Table(box=box.ASCII2, show_edge=False, pad_edge=True, header_style="bold")
    for index, name in enumerate(columns):
        values = [row[index] for row in rows if row[index] is not None]
        numeric = bool(values) and all(isinstance(value, (int, float)) for value in values)
        table.add_column(escape(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(format_cell(value)) for value in row))
    return table


def _print_checks(checks: Sequence[Check], console: Console) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = f"[{_STYLES[check.status]}]{check.status:<7}[/{_STYLES[check.status]}]"
        text = f"  {mark} {escape(check.name):<{width}}  {escape(check.detail)}"
        console.print(text.rstrip(), highlight=False, soft_wrap=True)
        if check.fix and check.status != "ok":
            console.print(
                f"          {escape('fix: ' + check.fix)}", highlight=False, soft_wrap=True
            )


def _verdict(report: Report) -> str:
    counts = {status: 0 for status in STATUSES}
    for check in report.all_checks:
        counts[check.status] += 1
    parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    word, style = ("HOLDS", "bold green") if report.ok else ("FAILED", "bold red")
    return f"[{style}]{word}[/{style}]: {parts}"


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    finite = not isinstance(value, float) or value - value == 0
    return value if finite else None
