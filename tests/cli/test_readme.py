"""What README and CONTRIBUTING tell people to type exists, with the options they show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli.main import VERBS

ROOT = Path(__file__).parents[2]
TEXT = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
MAKEFILE = (ROOT / "Makefile").read_text()
# What a reader may type: code blocks, and code in a line.
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
TYPED = "\n".join(block or inline for block, inline in CODE.findall(TEXT))
VERB_LINES = sorted(set(re.findall(r"^firstlight [a-z][^#\n]*", TYPED, re.MULTILINE)))


def test_make_targets_exist():
    targets = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", TYPED))
    defined = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.MULTILINE))
    assert len(targets) >= 4
    assert targets - defined == set()


def test_make_variables_exist():
    used = set(re.findall(r"\b([A-Z][A-Z_]+)=", TYPED)) - {"FIRSTLIGHT_DEBUG"}
    defined = set(re.findall(r"^([A-Z0-9_]+) \?=", MAKEFILE, re.MULTILINE))
    assert used and used - defined == set()


def test_every_verb_is_shown_to_the_reader():
    shown = {line.split()[1] for line in VERB_LINES}
    assert set(VERBS) - shown - {"version"} == set()


@pytest.mark.parametrize("line", VERB_LINES)
def test_commands_parse(line):
    _, verb, *rest = line.split()
    assert verb in VERBS
    options = [word for word in rest if word.startswith("-")]
    shown = subprocess.run(
        [sys.executable, "-m", "firstlight.cli.main", verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [option for option in options if f"{option} " not in shown] == []


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_exit_codes_are_those_of_the_error_tree():
    rows = re.findall(r"^\| (\d+) \| ", TEXT, re.MULTILINE)
    assert rows == ["0", "1", "2", "3", "4", "70", "130"]
