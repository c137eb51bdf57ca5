"""Owns the opening of whatever holds weights: a store, a checkpoint folder or a single file."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.checkpoint.dequantised import dequantised
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.json_file import read_json
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import open_store
from firstlight.checkpoint.store_names import MODEL_FOLDER, is_store
from firstlight.errors import BadInput
from firstlight.models.spec import ModelSpec, read_model_spec


@dataclass(frozen=True)
class WeightSource:
    """Weights and what their config says. `digest` names the exact bytes they came from."""

    weights: Any
    spec: ModelSpec
    digest: str


def open_source(path: Path) -> WeightSource:
    """Opens a store (a directory with COMPLETE), a checkpoint folder, a safetensors or GGUF file.

    Raises BadInput when there is nothing of the kind at `path`, and what the readers raise.
    """
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    if is_store(path):
        store = open_store(path)
        config = read_json(path / MODEL_FOLDER / "config.json")
        return WeightSource(store, read_model_spec(config), store.manifest.source.content_digest)
    checkpoint = open_checkpoint(path)
    spec = read_model_spec(checkpoint.config())
    plain = dequantised(checkpoint, spec)
    refuse_errors(plain.findings, str(path))
    return WeightSource(plain, spec, plain.source_digest())


def stored_types(weights: Any) -> dict[str, int]:
    """Counts the tensors of an opened source by their form in the file the model came from."""
    manifest = getattr(weights, "manifest", None)
    if manifest is not None:
        return dict(manifest.source.stored)
    return dict(Counter(info.stored for info in weights.tensors.values()))
