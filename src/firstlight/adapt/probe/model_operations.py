"""Owns which operations of the kernel registry a model's modules call, text and image path apart.

Read from the source of the modules it is built of, so that a new family needs no list; the model is
built without storage. Over-counts what a branch may leave out, and never misses a call.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firstlight.assembly.build import build_on_meta
from firstlight.assembly.source import open_source
from firstlight.checkpoint.json_file import read_json
from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.registry import OPERATIONS, PACKED
from firstlight.models.spec import ModelSpec, read_model_spec

IMAGE_MODULES = ("vision", "projector")
SAMPLING = frozenset({"greedy"})


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Returns the operations of both paths: `operations PLATFORM DTYPE PATH`."""
    platform, dtype, *path = words
    kernels = builtin_kernels().resolve(machine_query(platform=platform, dtype=dtype))
    text, image = operations_of(read_spec(Path(" ".join(path))))
    if kernels.packs_weights and dtype == "float32":
        text |= set(PACKED)
    return {"text": sorted(text), "image": sorted(image)}


def read_spec(path: Path) -> ModelSpec:
    """Returns the spec of a config file, or of a folder, store or file that has one in it."""
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.exists():
        return read_model_spec(read_json(config))
    return open_source(path).spec


def operations_of(spec: ModelSpec) -> tuple[set[str], set[str]]:
    """Returns what the text path calls, sampling included, and what the image path calls."""
    module = build_on_meta(spec, reference_kernels(), 1)
    text, image = set(SAMPLING), set[str]()
    known: dict[type, frozenset[str]] = {}
    for name, child in module.named_modules():
        kind = type(child)
        known[kind] = known.get(kind) or _called_by(kind)
        called = image if name.split(".")[0] in IMAGE_MODULES else text
        called |= known[kind]
    return text, image


def _called_by(kind: type) -> frozenset[str]:
    """Operations named as `kernels.OPERATION` in a module class of ours or in one it extends."""
    found: set[str] = set()
    for part in kind.__mro__:
        if not part.__module__.startswith("firstlight."):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(part)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_kernels(node.value):
                found.add(node.attr)
    return frozenset(found & set(OPERATIONS))


def _is_kernels(node: ast.expr) -> bool:
    name = str(getattr(node, "attr", "") or getattr(node, "id", ""))
    return name.lstrip("_") == "kernels"
