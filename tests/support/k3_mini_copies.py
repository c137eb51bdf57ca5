"""Copies of the bundled k3-mini, whole or damaged in one way, and the name of every damage.

Knows files and nothing of services.
"""

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BUNDLED = Path(str(resources.files("firstlight") / "data" / "k3_mini"))
_LAYER = "language_model.model.layers"
_EXPERT = f"{_LAYER}.3.block_sparse_moe.experts.5"


def copy_k3_mini(folder: Path, damage: str = "") -> Path:
    """Writes a copy, damaged as DAMAGES says where one is named."""
    shutil.copytree(BUNDLED, folder)
    if damage:
        DAMAGES[damage](folder)
    return folder


def _files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: folder / file for name, file in index["weight_map"].items()}


def _rewrite(path: Path, values: dict[str, torch.Tensor]) -> None:
    held = load_file(path)
    assert set(values) <= set(held) and values
    save_file({**held, **values}, path, metadata={"format": "pt"})


def _swap_layers(folder: Path) -> None:
    """Layers 1 and 2 hold each other's attention."""
    files = _files(folder)
    prefixes = [f"{_LAYER}.{layer}.self_attn." for layer in (1, 2)]
    paths = [next(file for name, file in files.items() if name.startswith(p)) for p in prefixes]
    held = [load_file(path) for path in paths]
    for number in (0, 1):
        own, other = prefixes[number], prefixes[1 - number]
        values = held[1 - number].items()
        moved = {own + n.removeprefix(other): v for n, v in values if n.startswith(other)}
        _rewrite(paths[number], moved)


def _double_expert(folder: Path) -> None:
    """One expert's output is twice what it was: its scales are powers of two."""
    name = f"{_EXPERT}.w2.weight_scale"
    path = _files(folder)[name]
    _rewrite(path, {name: load_file(path)[name] + 1})


def _zero_images(folder: Path) -> None:
    """Whatever an image shows, its features are zeros."""
    name = "mm_projector.proj.2.weight"
    path = _files(folder)[name]
    _rewrite(path, {name: torch.zeros_like(load_file(path)[name])})


def _swap_marks(folder: Path) -> None:
    """The marks that open and close a part of the template mean each other."""
    path = folder / "tokenizer_config.json"
    text = path.read_text()
    assert "<|open|>" in text and "<|close|>" in text
    text = text.replace("<|open|>", "<|?|>").replace("<|close|>", "<|open|>")
    path.write_text(text.replace("<|?|>", "<|close|>"))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "layers swapped": _swap_layers,
    "expert doubled": _double_expert,
    "images are zeros": _zero_images,
    "wrong template": _swap_marks,
}
