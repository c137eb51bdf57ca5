"""Owns what can be known of a model from its path without torch: its spec, from whatever holds
it.
"""

from pathlib import Path

from firstlight.checkpoint.json_file import read_json
from firstlight.checkpoint.store_names import MODEL_FOLDER, is_store, refuse_unfinished
from firstlight.errors import BadInput
from firstlight.models.spec import ModelSpec, read_model_spec


def read_spec(path: Path) -> ModelSpec:
    """Returns the spec of a store, a checkpoint folder, a safetensors or a GGUF file.

    Raises BadInput when there is nothing at `path`, ConfigError for a config that cannot be used.
    """
    if not path.exists():
        raise BadInput(f"{path}: no such file or directory")
    if is_store(path):
        refuse_unfinished(path)
        return read_model_spec(read_json(path / MODEL_FOLDER / "config.json"))
    if path.is_dir() and (path / "config.json").exists():
        return read_model_spec(read_json(path / "config.json"))
    from firstlight.checkpoint.reader import open_checkpoint

    checkpoint = open_checkpoint(path)
    try:
        return read_model_spec(checkpoint.config())
    finally:
        checkpoint.close()


def inputs_path(path: Path) -> Path:
    """Returns what holds the tokenizer and the texts of a model: a folder, or the GGUF file."""
    return path / MODEL_FOLDER if is_store(path) else path
