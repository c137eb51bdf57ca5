"""The report as one HTML file: well-formed, whole, escaped, and nothing from outside."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from firstlight.accept.report import Check, Report, Section
from firstlight.accept.report_page import render_page, require_writable, write_page
from firstlight.accept.samples import load_profile
from firstlight.errors import EnvironmentProblem

VOID = {"meta", "img", "br"}
EVIL = '<script src="https://example.org/x.js">alert(1)</script>'


class Page(HTMLParser):
    """A page's tags; every one that opens must close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def answer(**changes: Any) -> dict[str, Any]:
    row = {
        "prompt": "Which digit is this?",
        "images": [],
        "tool_result": "",
        "shown": True,
        "text": "7",
        "reasoning": "digit=7",
        "calls": [],
        "right": True,
    }
    return {**row, **changes}


def report_of(*answers: dict[str, Any], **serve: Any) -> Report:
    sections = (Section("smoke: answers", checks=(Check("digits", "fail", EVIL, "look"),)),)
    layers = (Check("inspect", "ok", "1 check holds"), Check("serve", "fail", EVIL, "fix it"))
    data = {"smoke": {"answers": list(answers)}, "serve": serve}
    return Report("firstlight up", sections, layers, data)


def test_pictures_answers_thoughts_and_calls_are_shown() -> None:
    picture = next(one.images[0] for one in load_profile("k3-mini").samples if one.images)
    call = {"name": "get_weather", "arguments": '{"city": "Lima"}'}
    hidden = answer(shown=False, text="not shown")
    wrong = answer(shown=False, text="shown since wrong", right=False)
    page = Page(
        render_page(report_of(answer(images=[picture]), answer(calls=[call]), hidden, wrong))
    )
    (shown,) = page.all("img")
    kind, _, data = shown["src"].partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG")
    for text in ("digit=7", 'get_weather({"city": "Lima"})', "shown since wrong", "inspect"):
        assert text in page.text
    assert "not shown" not in page.text


def test_what_a_user_asked_is_shown_without_a_verdict() -> None:
    asked = {"prompt": "Add:\n7+5", "text": "12", "reasoning": "sum", "calls": []}
    report = Report("firstlight up", data={"ask": {"answers": [asked]}})
    page = Page(render_page(report))
    assert "7+5" in page.text and "reasoning: sum" in page.text
    assert not [word for word in ("right", "wrong", "undecided") if word in page.text]


def test_nothing_comes_from_outside_and_nothing_is_run() -> None:
    text = render_page(report_of(answer(prompt=EVIL, text=EVIL, reasoning=EVIL)))
    page = Page(text)
    assert page.all("script") == [] and page.all("link") == [] and page.all("iframe") == []
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "data:").startswith("data:")
        assert not [name for name in attributes if name.startswith("on")]
    assert re.findall(r"url\(|@import", text) == []
    assert EVIL in page.text


def test_time_and_memory_are_drawn() -> None:
    phases = [
        {"parent": "", "name": "load weights", "began": 1.0, "ended": 3.0},
        {"parent": "rank 0", "name": "import torch", "began": 0.0, "ended": 1.5},
    ]
    memory = [
        {"component": "weights/0", "planned": 4e6, "measured": 4e6},
        {"component": "kv/0", "planned": 1e6, "measured": 2e6},
    ]
    page = Page(render_page(report_of(startup={"phases": phases}, memory=memory)))
    bars = {kind: [b for b in page.all("rect") if b["class"] == kind] for kind in KINDS}
    assert [len(found) for found in bars.values()] == [2, 2, 2]
    first, second = bars["phase"]
    assert float(first["x"]) < float(second["x"]) and float(first["width"]) < float(second["width"])
    assert float(bars["measured"][0]["width"]) > float(bars["measured"][1]["width"])
    for text in ("rank 0 import torch", "2.00 s", "weights/0", "measured 1.91 MiB"):
        assert text in page.text


KINDS = ("phase", "planned", "measured")


def test_a_report_that_stopped_early_is_a_page_too(tmp_path: Path) -> None:
    report = Report("firstlight up", checks=(Check("inspect", "fail", "a file is short"),))
    path = tmp_path / "reports" / "one.html"
    require_writable(path)
    write_page(report, path)
    assert "a file is short" in Page(path.read_text()).text


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="name another file"):
        require_writable(tmp_path / "file" / "one.html")
