"""`up --rehearse`: a start gone through for every rank, with what would fail."""

import contextlib
import io
import json
from pathlib import Path

import psutil
import pytest

from firstlight.cli.main import main
from firstlight.platforms.find import find_platform

DATA = Path(__file__).parents[1] / "data" / "k3"
REAL = DATA / "full" / "config.json"


def run(*words):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["up", *words, "--rehearse", "--json"])
    return code, json.loads(printed.getvalue())


def failed(report):
    return [check["name"] for check in report["checks"] if check["status"] == "fail"]


def test_a_plan_file_is_rehearsed_as_it_stands(tmp_path):
    plan = tmp_path / "plan.json"
    words = ("--devices", "1xB300", "--tp", "1", "--dtype", "float32", "--context", "256")
    assert main(["plan", str(DATA / "checkpoint"), *words, "--plan-path", str(plan)]) == 0
    code, report = run(str(DATA / "checkpoint"), "--plan", str(plan))
    assert code == 0 and failed(report) == []
    (built,) = report["data"]["built"]
    assert built["num_bytes"] == report["data"]["ranks"][0]["held_bytes"] > 0


def test_what_serve_has_no_option_for_is_a_check_that_would_fail():
    words = ("--devices", "4xB300@4", "--context", "256", "--concurrency", "512")
    code, report = run(str(DATA / "checkpoint"), *words)
    world = len(report["data"]["ranks"])
    assert code == int(world > 1) and failed(report) == ["serve takes the plan"] * (world > 1)


def test_neither_plan_nor_devices_is_said(capsys):
    assert main(["up", str(REAL), "--rehearse"]) == 2
    assert "--plan FILE, or --devices" in capsys.readouterr().err


@pytest.mark.slow
def test_64_ranks_of_the_real_kimi_k3():
    words = ("--devices", "64xS5000@8", "--context", "1M", "--images", "4")
    resident = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak of tests before is no longer told
    _, report = run(str(REAL), *words)
    assert find_platform("cpu").peak_bytes() - resident < 2 * 2**30
    assert failed(report) == ["serve takes the plan"]
    data = report["data"]
    assert sorted(rank for built in data["built"] for rank in built["ranks"]) == list(range(64))
    held = {load["rank"]: load["held_bytes"] for load in data["ranks"]}
    assert all(built["num_bytes"] == held[r] for built in data["built"] for r in built["ranks"])
