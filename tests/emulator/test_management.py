"""The stand-in for the management library, through the platform that reads the real one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "site" / "pymtml_record.json"
READ = """
import json
from firstlight.platforms.musa import read_cards
try:
    print(json.dumps(read_cards()))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""


def cards_of(emulated_variables: dict[str, str], record: Path | None = None) -> dict[str, Any]:
    environment = {**os.environ, **emulated_variables}
    if record is not None:
        environment["EMULATED_MTML"] = str(record)
    done = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_eight_linked_cards(emulated_variables: dict[str, str]) -> None:
    found = cards_of(emulated_variables)
    assert found["driver"] == json.loads(RECORD.read_text("utf-8"))["driver"]
    assert len(found["cards"]) == 8 and len(found["links"]) == 56
    assert {link["state"] for link in found["links"]} == {"up"}
    assert found["cards"][0]["total"] == 80 * 2**30


def test_a_link_that_is_slow_and_one_that_is_down(
    emulated_variables: dict[str, str], tmp_path: Path
) -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    record["cards"][2]["links"][0]["state"] = "down"
    record["cards"][5]["links"][3]["state"] = "downgrade"
    (tmp_path / "record.json").write_text(json.dumps(record), "utf-8")
    links = cards_of(emulated_variables, tmp_path / "record.json")["links"]
    broken = {(link["card"], link["link"]): link["state"] for link in links}
    assert {place: state for place, state in broken.items() if state != "up"} == {
        (2, 0): "down",
        (5, 3): "downgrade",
    }


def test_no_library_and_no_driver(emulated_variables: dict[str, str], tmp_path: Path) -> None:
    for state, words in (("absent", "OSError: libmtml.so"), ("no driver", "MTMLError")):
        record = tmp_path / "record.json"
        record.write_text(json.dumps({"library": state}), "utf-8")
        assert words in cards_of(emulated_variables, record)["error"]
