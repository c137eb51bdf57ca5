"""What a run of k3-mini begins with, made once: it takes seconds and no test changes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from firstlight.training.loop import Run
from firstlight.training.recipes.k3_mini import recipe
from firstlight.training.session import open_run


class Prepared(NamedTuple):
    """A folder with the recipe's own files, and the config of the model in training."""

    folder: Path
    config: Mapping[str, Any]


class Begun(NamedTuple):
    """A run of seed 0 before its first step, and its folder."""

    run: Run
    folder: Path


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("k3-mini")
    return Prepared(folder, recipe.prepare(folder))


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("begun") / "run"
    return Begun(open_run("k3-mini", folder, seed=0), folder)
