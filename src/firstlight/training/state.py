"""Owns what a training run is at a step, and keeping it in a file from which it goes on exactly.

It knows no task. A file is written beside its place and moved there, so a stop leaves the old one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.errors import ConfigError


@dataclass
class Progress:
    """The stage and the step in it, steps in `total`, tokens and seconds so far, the curriculum's
    levels, and the history (step, loss).
    """

    stage: int = 0
    step: int = 0
    total: int = 0
    tokens: int = 0
    seconds: float = 0.0
    levels: dict[str, float] = field(default_factory=dict)
    history: list[tuple[int, float]] = field(default_factory=list)


def save_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Writes parameters, optimiser and progress to `path`, replacing what was there."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    content = {"model": values, "optimizer": optimizer.state_dict(), "progress": vars(progress)}
    waiting = path.with_suffix(".part")
    torch.save(content, waiting)
    os.replace(waiting, path)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Progress:
    """Fills a model, and its optimiser if given, and returns the progress.

    Raises ConfigError when the file is not of this model.
    """
    content = torch.load(path, weights_only=True)
    fill(model, content["model"], str(path))
    if optimizer is not None:
        optimizer.load_state_dict(content["optimizer"])
    return Progress(**content["progress"])


def fill(model: nn.Module, values: Mapping[str, Tensor], where: str) -> None:
    """Copies values by name. Raises ConfigError listing names or shapes that differ."""
    own: dict[str, Any] = dict(model.named_parameters())
    wrong = sorted(own.keys() ^ values.keys())
    wrong += [n for n in own.keys() & values.keys() if own[n].shape != values[n].shape]
    if wrong:
        raise ConfigError(f"{where}: not a checkpoint of this model; differs in {wrong[:8]}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])
