"""Holds what every verb relies on: the verdict, the stable JSON and ASCII output of a report."""

import io
import json
import math

import pytest
from rich.console import Console

from firstlight.accept.report import Check, Report, Section, format_cell, print_report


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_failed_check_anywhere_fails_the_report() -> None:
    inside = Section("memory", checks=(Check("fits", "fail", "3 GiB short", "halve the context"),))
    report = Report("probe", sections=(inside,), checks=(Check("driver", "ok"),))
    assert (report.ok, report.exit_code) == (False, 1)
    assert [check.name for check in report.failed] == ["fits"]


def test_warnings_and_unknowns_do_not_fail() -> None:
    report = Report("probe", checks=(Check("a", "warn"), Check("b", "unknown"), Check("c", "ok")))
    assert (report.ok, report.exit_code) == (True, 0)


def test_json_is_stable_and_strict() -> None:
    one = Report("t", data={"b": math.nan, "a": [1, math.inf]}, checks=(Check("c", "ok", "d"),))
    two = Report("t", data={"a": [1, math.inf], "b": math.nan}, checks=(Check("c", "ok", "d"),))
    assert one.to_json() == two.to_json()
    read = json.loads(one.to_json())
    assert read["data"] == {"a": [1, None], "b": None}
    assert read["checks"] == [{"name": "c", "status": "ok", "detail": "d", "fix": ""}]


def test_print_is_ascii_with_numbered_steps_and_fixes() -> None:
    section = Section(
        "plan [x]",
        lines=("a line",),
        steps=("read", "write"),
        columns=("name", "bytes"),
        rows=(("kv", 123456), ("none", None)),
        checks=(Check("fits", "fail", "short [by] 3", "buy memory"),),
    )
    text = printed(Report("title", sections=(section,)))
    assert text.isascii()
    for piece in ("plan [x]", "1. read", "2. write", "123,456", "short [by] 3", "fix: buy memory"):
        assert piece in text
    assert "FAILED: 1 fail" in text


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(AssertionError, match="memory"):
        Section("memory", columns=("a", "b"), rows=((1,),))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (1234567, "1,234,567"), (0.123456, "0.1235"), ("x", "x")],
)
def test_cells(value: str | int | float | None, text: str) -> None:
    assert format_cell(value) == text
