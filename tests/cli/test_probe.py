"""The verb `probe`: on this machine, on recorded ones, and where there is no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.cli.main import main

DATA = Path(__file__).parents[1] / "data"
MACHINES = DATA / "machines"
K3 = str(DATA / "k3" / "full" / "config.json")


def report(capsys, *words):
    code = main(["probe", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def checks(found):
    return {c["name"]: c for section in found["sections"] for c in section["checks"]}


def lines(found, title):
    return next(s["lines"] for s in found["sections"] if s["title"].startswith(title))


def test_a_healthy_recorded_machine_holds(capsys):
    code, found = report(capsys, "--machine", str(MACHINES / "healthy-s5000.json"))
    assert code == 0 and found["data"]["platform"] == "musa"
    assert [s["title"].split(".")[0] for s in found["sections"]][2:13] == [
        str(n) for n in range(1, 12)
    ]
    assert len(found["data"]["devices"]) == 8 and found["data"]["devices"][0]["arch"] == 31


def test_the_topology_is_drawn(capsys):
    _, found = report(capsys, "--machine", str(MACHINES / "link-down.json"))
    drawn = lines(found, "topology")
    assert drawn[0] == "node 0: processors 0-63"
    assert "  +- card 3  0000:13:00.0  MTT S5000" in drawn and "  +- network mlx5_1" in drawn
    assert any("DOWN1" in line for line in drawn) and max(map(len, drawn)) <= 76


def test_a_broken_machine_fails_with_its_fix(capsys):
    code, found = report(capsys, "--machine", str(MACHINES / "arch-21.json"))
    assert code == 1
    assert "not served" in checks(found)["cards"]["detail"] and checks(found)["cards"]["fix"]


def test_a_model_is_judged_in_numbers(capsys):
    machine = str(MACHINES / "healthy-s5000.json")
    code, found = report(capsys, K3, "--machine", machine, "--context", "128K", "--nodes", "2")
    fits = lines(found, "what fits on 8 x S5000")
    assert any("short by" in line and "GiB on rank 0" in line for line in fits)
    assert code == 0 and any("devices hold it" in line for line in fits)


def test_weights_that_have_no_room_fail(capsys):
    machine = str(MACHINES / "full-disk.json")
    code, found = report(capsys, K3, "--machine", machine)
    assert code == 1 and "TiB needed" in checks(found)["disk"]["detail"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--machine", "nowhere.json"), 3, "no record of a machine"),
        (("--device", "abacus"), 2, "there is no platform 'abacus'"),
        (("--dtype", "int3"), 2, "int3"),
        (("nowhere",), 3, "no such file or directory"),
    ],
)
def test_mistakes_are_one_line(capsys, words, code, message):
    assert main(["probe", *words]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# A torch that cannot be imported, in front of the real one: the machine of somebody who has none.
WITHOUT_TORCH = """
import importlib.metadata, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
sys.meta_path.insert(0, Absent())
real = importlib.metadata.version
def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
"""


def test_without_torch_it_still_reports(tmp_path):
    """In its own process and in those it starts: both find no torch."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    done = subprocess.run(
        [sys.executable, "-m", "firstlight.cli.main", "probe", "--json", "--device", "cpu"],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(p for p in sys.path if p)}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    said = checks(found)
    assert said["torch"]["status"] == "fail" and "pip install torch==" in said["torch"]["fix"]
    for name in ("collectives", "known answers", "kernels"):
        assert said[name]["status"] == "unknown" and said[name]["fix"], name
    assert said["system"]["status"] == said["disk"]["status"] == "ok"
    assert found["data"]["devices"][0]["total_bytes"] > 0


@pytest.mark.slow
def test_this_machine_for_a_model(capsys, tmp_path):
    record = tmp_path / "record.json"
    words = ("--device", "cpu", "--context", "256", "--record", str(record))
    code, found = report(capsys, str(DATA / "k3" / "checkpoint"), *words)
    said = checks(found)
    assert code == 0
    assert said["kernels agree with their references"]["status"] == "ok"
    assert "image path" in said and "text path" in said
    assert found["data"]["devices"][0]["total_bytes"] > 0
    assert {section["title"] for section in found["sections"]} >= {"devices", "versions"}
    assert {row["state"] for row in found["data"]["kernels"].values()} <= {"fast", "reference"}
    assert lines(found, "what fits")[0].startswith("tp 1 fits with")
    code, again = report(capsys, "--device", "cpu", "--machine", str(record))
    assert code == 0 and checks(again)["system"] == said["system"]
