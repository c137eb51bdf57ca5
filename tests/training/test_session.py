"""`firstlight train` begins, continues, refuses, and says where the run stands."""

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.adapt.inspect import inspect_path
from firstlight.cli.main import main
from firstlight.errors import ConfigError
from firstlight.training.session import CHECKPOINT_FOLDER, open_run, publish, run_session


def told(capsys: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_a_run_stops_when_told_and_goes_on_from_there(tmp_path: Path, capsys: Any) -> None:
    for step in (1, 2):
        assert main(["train", "k3-mini", str(tmp_path), "--minutes", "0", "--json"]) == 0
        report = told(capsys)
        assert report["data"]["steps"] == step and report["data"]["checkpoint"] is None
        assert report["checks"][0]["status"] == "warn"
    assert (tmp_path / "loss.svg").is_file()


def test_its_checkpoint_is_one_the_other_verbs_read(begun: Any) -> None:
    target = publish("k3-mini", begun.run, begun.folder)
    report = inspect_path(target)
    assert target.name == CHECKPOINT_FOLDER and report.sound
    assert report.legal_tp == (1, 2, 4)
    assert sum(p.stat().st_size for p in target.iterdir()) < 8_000_000


def test_other_recipes_seeds_and_folders_are_refused(begun: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k3-mini"):
        run_session("k4", tmp_path, seconds=0, seed=0, report=lambda step: None)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        open_run("k3-mini", tmp_path / "taken", seed=0)
    with pytest.raises(ConfigError, match="seed 0"):
        open_run("k3-mini", begun.folder, seed=1)
