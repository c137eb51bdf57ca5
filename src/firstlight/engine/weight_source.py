"""Owns the question whether weights may take the place of others in a running service.

Reads small files only; knows no rank.
"""

from pathlib import Path

from blake3 import blake3

from firstlight.checkpoint.store_names import is_store
from firstlight.errors import BadInput
from firstlight.runner.model_path import inputs_path, read_spec

# What turns text into tokens and back, in front of the names of its files: the API goes on with it.
_TEXT_FILES = ("token", "vocab", "merges", "special_tokens", "chat_template", "tiktoken")


def check_replacement(old: Path, new: Path, *, load_from: str) -> None:
    """Raises BadInput unless `new` holds weights of the model `old` is of, with the same tokens, in
    a form that can be read as `load_from` says."""
    if new == old:
        return
    if not new.exists():
        raise BadInput(f"{new}: no such file or directory")
    if load_from != "own" and not is_store(new):
        raise BadInput(
            f"{new}: one rank reads for all here, which needs a store (`shard` makes one)"
        )
    if read_spec(new).config != read_spec(old).config:
        raise BadInput(f"{new}: its config is not that of the model served, {old}; start a service")
    ours, theirs = _text_files(old), _text_files(new)
    differ = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if differ:
        raise BadInput(
            f"{new}: its tokens are not those of the model served: {', '.join(differ)} differ; "
            "start a service with it"
        )


def _text_files(path: Path) -> dict[str, bytes]:
    folder = inputs_path(path)
    if not folder.is_dir():  # GGUF: tokens are in the file, beside the weights
        return {}
    files = [file for file in folder.iterdir() if file.name.lower().startswith(_TEXT_FILES)]
    return {file.name: blake3(file.read_bytes()).digest() for file in files if file.is_file()}
