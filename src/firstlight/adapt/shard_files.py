"""Owns which files beside the weights go into a store, and what licence they state; no weights."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firstlight.checkpoint.dequantised import DequantisedCheckpoint
from firstlight.checkpoint.gguf import GgufCheckpoint
from firstlight.checkpoint.positioned_io import explained
from firstlight.checkpoint.store import Store, digest_files
from firstlight.checkpoint.store_names import MODEL_FOLDER
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.errors import UsageError

MODEL_FILES = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_PATTERNS = ("*.tiktoken", "additional_chat_templates/*.jinja")
_LICENCES = ("LICENSE*", "LICENCE*", "License*", "NOTICE*", "COPYING*")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---", re.DOTALL)
_LICENCE_LINE = re.compile(r"^license(?:_name)?:\s*(.+?)\s*$", re.MULTILINE)

TokenizerExport = Callable[[Path, Path], None]


def find_model_files(folder: Path) -> list[Path]:
    """Returns a folder's config, tokenizer, template, generation, image and licence files."""
    found = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    for pattern in (*_PATTERNS, *_LICENCES):
        found.extend(p for p in sorted(folder.glob(pattern)) if p.is_file() and p not in found)
    return found


def find_licence(checkpoint: Checkpoint) -> str:
    """Returns what the model says its licence is: a name, else the licence file, else ``."""
    if isinstance(checkpoint, GgufCheckpoint):
        return str(checkpoint.field("general.license", ""))
    path = checkpoint.path
    return licence_in(path if path.is_dir() else path.parent)


def licence_in(folder: Path) -> str:
    """Returns the licence a model folder states in its card or has as a file, else ``."""
    card = folder / "README.md"
    if card.is_file():
        matter = _FRONT_MATTER.match(card.read_text("utf-8", errors="replace"))
        line = _LICENCE_LINE.search(matter[1]) if matter else None
        if line:
            return line[1].strip("'\"")
    files = [p.name for pattern in _LICENCES for p in sorted(folder.glob(pattern))]
    return f"see {files[0]}" if files else ""


def copy_model_files(
    checkpoint: Checkpoint, target: Path, export_tokenizer: TokenizerExport | None
) -> dict[str, str]:
    """Fills the model folder of a store and returns the BLAKE3 of every file by its relative name.

    `export_tokenizer(gguf_file, folder)` writes tokenizer files for a GGUF source, which has them
    in its metadata. Raises UsageError when such a source comes without it.
    """
    shutil.rmtree(target, ignore_errors=True)
    with explained(target, 0, "fill"):
        target.mkdir(parents=True)
        if isinstance(checkpoint, GgufCheckpoint):
            if export_tokenizer is None:
                raise UsageError(f"{checkpoint.path}: a GGUF source needs a tokenizer exporter")
            _write_json(target / "config.json", checkpoint.config())
            _write_generation(checkpoint, target)
            export_tokenizer(checkpoint.path, target)
        else:
            folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
            for path in find_model_files(folder):
                copy = target / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            if isinstance(checkpoint, DequantisedCheckpoint):
                _write_json(target / "config.json", checkpoint.config())
    return digest_files(target)


def _write_generation(checkpoint: Checkpoint, target: Path) -> None:
    config = checkpoint.config()
    kept: dict[str, Any] = {
        k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config
    }
    _write_json(target / "generation_config.json", kept)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")


def copy_stored_files(store: Store, target: Path) -> None:
    """Copies the model folder of a store beside exported weights."""
    folder = store.path / MODEL_FOLDER
    with explained(target, 0, "fill"):
        shutil.copytree(folder, target, dirs_exist_ok=True)
