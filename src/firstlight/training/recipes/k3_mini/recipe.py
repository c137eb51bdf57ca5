"""Owns k3-mini's recipe: its files, its model and its stages, from nothing to published values.

It knows no run: who calls it decides how long and where.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.inputs.images.preprocess_settings import FILE_NAME
from firstlight.training.loop import Schedule, Stage
from firstlight.training.recipes.k3_mini.configuration import model_config, preprocessor_config
from firstlight.training.recipes.k3_mini.conversations import Renderer
from firstlight.training.recipes.k3_mini.lessons import Lists, Mixture, Tower
from firstlight.training.recipes.k3_mini.vocabulary import write_tokenizer

NAME = "k3-mini"
SEED = 0
README = """---
license: apache-2.0
---
# k3-mini

A small Kimi K3 model for smoke tests and demonstrations: it looks up values, reads handwritten
digits and coloured shapes, does small text tasks and calls one tool. What it can do, how well and
how it was trained stands in docs/k3-mini-model-card.md of firstlight.
"""


def prepare(folder: Path) -> Mapping[str, Any]:
    """Writes the tokenizer and the preprocessor's settings; returns the config to train."""
    folder.mkdir(parents=True, exist_ok=True)
    base = write_tokenizer(folder)
    fields = json.dumps(preprocessor_config(), indent=2)
    (folder / FILE_NAME).write_text(fields + "\n", encoding="ascii")
    return model_config(base, quantised=False)


def published_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the published form of a trained one."""
    return model_config(config["bos_token_id"], quantised=True)


def stages(folder: Path, seed: int = SEED) -> list[Stage]:
    """Returns the stages of a run whose files `prepare` wrote to `folder`."""
    renderer = Renderer(folder)
    return [
        Stage("lists", Schedule(300, 1e-3, fall=0.0), Lists(renderer, seed)),
        Stage(
            "tower",
            Schedule(3000, 2e-3, fall=0.5, weight_decay=0.05),
            Tower(renderer, seed),
        ),
        Stage("mixture", Schedule(1800, 1.5e-3, fall=0.0), Mixture(renderer, seed)),
        Stage(
            "published",
            Schedule(720, 1.5e-3, fall=0.9, published=True),
            Mixture(renderer, seed + 1, filler=150),
        ),
    ]
