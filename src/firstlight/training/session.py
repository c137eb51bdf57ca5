"""Owns one call of training: a recipe by name, a folder that holds the run, and what is written.

It draws nothing: who calls it shows the steps.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from firstlight.errors import ConfigError
from firstlight.training.export import export_checkpoint
from firstlight.training.loop import STATE_FILE, Run, StepReport, train
from firstlight.training.model import build_trainable
from firstlight.training.operations import training_kernels
from firstlight.training.picture import Mark, loss_svg
from firstlight.training.recipes.k3_mini import recipe as k3_mini

RECIPES: Mapping[str, ModuleType] = {k3_mini.NAME: k3_mini}
CONFIG_FILE, PICTURE_FILE, CHECKPOINT_FOLDER = "training_config.json", "loss.svg", "checkpoint"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "preprocessor_config.json")
_TRIM, _TOP_PAD, _MMAP = -1, -2, -3  # parameters of glibc's mallopt
_MIB = 1 << 20


@dataclass(frozen=True)
class SessionReport:
    """Where a run stands after a call: `checkpoint` is None until all stages are done."""

    folder: Path
    steps: int
    tokens: int
    seconds: float
    last_loss: float | None
    checkpoint: Path | None


def run_session(
    name: str,
    folder: Path,
    *,
    seconds: float | None,
    seed: int,
    report: Callable[[StepReport], Any],
) -> SessionReport:
    """Begins or continues the run in `folder`; at its end exports the checkpoint.

    `report` hears of each step. Raises ConfigError for an unknown
    recipe, or a folder that holds something else.
    """
    run = open_run(name, folder, seed=seed)
    keep_large_blocks()
    is_done = train(run, folder, seconds=seconds, report=report)
    progress = run.progress
    marks, first = [], 0
    for stage in run.stages:
        marks.append(Mark(first, stage.name))
        first += stage.schedule.steps
    picture = loss_svg(progress.history, marks, f"{name}: loss")
    (folder / PICTURE_FILE).write_text(picture, encoding="ascii")
    return SessionReport(
        folder=folder,
        steps=progress.total,
        tokens=progress.tokens,
        seconds=progress.seconds,
        last_loss=progress.history[-1][1] if progress.history else None,
        checkpoint=publish(name, run, folder) if is_done else None,
    )


def open_run(name: str, folder: Path, *, seed: int) -> Run:
    """Returns the run in a folder, where its last state left it, or a new one in a new folder."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}; there are: {', '.join(sorted(RECIPES))}")
    recipe = RECIPES[name]
    kept = {"recipe": name, "seed": seed}
    if (folder / CONFIG_FILE).is_file():
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if {key: content.get(key) for key in kept} != kept:
            raise ConfigError(
                f"{folder}: holds a run of recipe {content.get('recipe')!r} with seed "
                f"{content.get('seed')}; name these, or use a new folder"
            )
        config = content["config"]
    else:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty and holds no run; use a new folder")
        config = recipe.prepare(folder)
        text = json.dumps({**kept, "config": config}, indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    run = Run(build_trainable(config, training_kernels(), seed), recipe.stages(folder, seed))
    if (folder / STATE_FILE).is_file():
        run.resume(folder / STATE_FILE)
    return run


def publish(name: str, run: Run, folder: Path) -> Path:
    """Writes the run's checkpoint in the published form, in place of an earlier one."""
    content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    target = folder / CHECKPOINT_FOLDER
    if target.exists():
        shutil.rmtree(target)
    values = {n: p.detach() for n, p in run.model.module.named_parameters()}
    export_checkpoint(values, RECIPES[name].published_config(content["config"]), target)
    for file in TOKENIZER_FILES:
        shutil.copyfile(folder / file, target / file)
    (target / "README.md").write_text(RECIPES[name].README, encoding="utf-8")
    return target


def keep_large_blocks() -> None:
    """Makes glibc keep freed memory: steps allocate the same tensors again, and mapping them anew
    costs page faults. Elsewhere this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter, value in ((_MMAP, 32 * _MIB), (_TRIM, 2047 * _MIB), (_TOP_PAD, 256 * _MIB)):
            library.mallopt(parameter, value)
