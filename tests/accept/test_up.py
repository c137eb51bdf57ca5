"""`up` broken on purpose at each layer stops there, says why, keeps the evidence, and fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from firstlight.accept.convert import convert
from firstlight.accept.report import Report
from firstlight.accept.up import LAYERS, UpSettings, run_up
from k3_mini_copies import BUNDLED, copy_k3_mini

FLAGS = ("--kv-budget-bytes", "64MiB", "--threads", "1")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("up") / "store"
    convert(BUNDLED, folder)
    return folder


def stopped_at(report: Report, layer: str) -> str:
    """Checks that a layer is the first that failed, and the last that was run; returns why."""
    place = LAYERS.index(layer)
    statuses = [check.status for check in report.checks]
    expected = ["ok"] * place + ["fail"] + ["unknown"] * (len(LAYERS) - place - 1)
    assert [check.name for check in report.checks] == list(LAYERS)
    assert statuses == expected, report.checks
    assert report.exit_code == 1
    assert set(LAYERS[: place + 1]) == set(report.data)
    assert all("not run" in check.detail for check in report.checks[place + 1 :])
    return report.checks[place].detail


def test_inspect_stops_at_a_truncated_file(tmp_path: Path) -> None:
    model = copy_k3_mini(tmp_path / "model")
    file = model / "model-00003-of-000007.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    why = stopped_at(run_up(UpSettings(model, tmp_path / "store")), "inspect")
    assert file.name in why
    assert not (tmp_path / "store").exists()


def test_shard_stops_at_a_target_that_is_no_store(tmp_path: Path) -> None:
    target = tmp_path / "store"
    target.write_text("a file")
    assert str(target) in stopped_at(run_up(UpSettings(BUNDLED, target)), "shard")
    assert target.read_text() == "a file"


def test_shard_stops_where_there_is_no_room(tmp_path: Path) -> None:
    """A limit on the size of files: the kernel refuses the write as a full disk does."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200000, 200000));"
        "from firstlight.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "up", str(BUNDLED), "--store", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "no room to" in done.stdout and "Traceback" not in done.stderr
    layers = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["fail", "shard"] in layers and ["unknown", "verify"] in layers


def test_verify_stops_at_a_flipped_byte(store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged)
    unit = max((damaged / "units").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(unit.read_bytes())
    data[len(data) // 2] ^= 1
    unit.write_bytes(data)
    why = stopped_at(run_up(UpSettings(BUNDLED, damaged)), "verify")
    assert unit.name in why or unit.stem in why


@pytest.mark.parametrize(
    ("flags", "word"),
    [(("--tp", "3"), "3"), (("--kv-budget-bytes", "1KiB"), "Raise the budget")],
)
def test_serve_stops_at_what_cannot_be_served(
    store: Path, flags: tuple[str, ...], word: str
) -> None:
    why = stopped_at(run_up(UpSettings(BUNDLED, store, serve_flags=flags)), "serve")
    assert word in why and "exit code" in why


@pytest.mark.slow
def test_smoke_stops_at_damaged_weights(tmp_path: Path) -> None:
    """The damage is older than the store: every digest holds, and the known answers are its own."""
    model = copy_k3_mini(tmp_path / "model", "layers swapped")
    settings = UpSettings(model, tmp_path / "store", profile="k3-mini", serve_flags=FLAGS)
    report = run_up(settings)
    assert stopped_at(report, "smoke")
    assert {"lookup", "likelihood of lists"} <= {check.name for check in report.failed}
    assert any(row["right"] is False for row in report.data["smoke"]["answers"])


@pytest.mark.slow
def test_ask_stops_at_an_answer_without_text(store: Path) -> None:
    settings = UpSettings(
        BUNDLED, store, ("Reverse:\nzebra,wool",), "k3-mini", serve_flags=FLAGS, question_tokens=1
    )
    assert "reasoning at the token limit" in stopped_at(run_up(settings), "ask")


@pytest.mark.slow
def test_stop_fails_when_the_service_does_not_drain(store: Path) -> None:
    def kill_at_stop(text: str) -> None:
        if text.endswith(" stop"):
            for child in psutil.Process().children():
                if "serve" in child.cmdline():
                    child.kill()

    settings = UpSettings(BUNDLED, store, profile="k3-mini", serve_flags=FLAGS)
    assert "exit code -9" in stopped_at(run_up(settings, say=kill_at_stop), "stop")
