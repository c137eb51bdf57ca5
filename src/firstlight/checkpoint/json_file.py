"""Owns the reading of JSON files whose names must not repeat; light enough for every process."""

import json
from pathlib import Path
from typing import Any

import msgspec

from firstlight.errors import BadInput, ConfigError, TensorError


def read_json(path: Path, kind: type[BadInput] = ConfigError) -> dict[str, Any]:
    """Returns a JSON object from a file. Raises `kind` naming the file when there is none."""
    return parse_json(_read(path, kind), path, kind)


def read_index(path: Path) -> dict[str, Any]:
    """Returns the fields of an index of tensors; raises TensorError naming the file otherwise."""
    return parse_index(_read(path, TensorError), path)


def _read(path: Path, kind: type[BadInput]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_json(raw: bytes, path: Path, kind: type[BadInput] = ConfigError) -> dict[str, Any]:
    """Returns the JSON object in a file's bytes. Raises `kind` naming the file if it is none."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise kind(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise kind(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def parse_index(raw: bytes, path: Path) -> dict[str, Any]:
    """Returns the fields of an index of half a million names, quickly where nothing is odd.

    Raises TensorError as `parse_json` does. Without escapes every string has two quotes, so the
    number of quotes proves that no name was repeated.
    """
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return parse_json(raw, path, TensorError)
    if b"\\" in raw or not isinstance(fields, dict) or raw.count(b'"') != 2 * _strings(fields):
        return parse_json(raw, path, TensorError)
    return fields


def _strings(value: object) -> int:
    """Counts the strings in a JSON value, names included."""
    if isinstance(value, dict):
        inner = [v for v in value.values() if type(v) is not str]
        return 2 * len(value) - len(inner) + sum(map(_strings, inner))
    if isinstance(value, list):
        return sum(map(_strings, value))
    return int(isinstance(value, str))


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
