"""Owns the reading of JSON files whose names must not repeat; light enough for every process."""

import json
from pathlib import Path
from typing import Any

from firstlight.errors import BadInput, ConfigError


def read_json(path: Path, kind: type[BadInput] = ConfigError) -> dict[str, Any]:
    """Returns a JSON object from a file. Raises `kind` naming the file when there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(raw, path, kind)


def parse_json(raw: bytes, path: Path, kind: type[BadInput] = ConfigError) -> dict[str, Any]:
    """Returns the JSON object in a file's bytes. Raises `kind` naming the file if it is none."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise kind(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"duplicate names: {', '.join(duplicates(pairs))}")
    return fields


def duplicates(pairs: list[tuple[str, Any]]) -> list[str]:
    """Returns the names that occur more than once."""
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name, _ in pairs:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return list(twice)
