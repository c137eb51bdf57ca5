"""Owns what a store is called on disk and how one is recognised; light enough for every process."""

from pathlib import Path

MANIFEST_NAME = "manifest.json"
COMPLETE_NAME = "COMPLETE"
UNITS_FOLDER, MODEL_FOLDER, ANSWERS_FOLDER = "units", "model", "answers"
PARTIAL_FOLDER = "partial"


def is_store(path: Path) -> bool:
    """Says whether a directory is a store, finished or not (and not a checkpoint)."""
    names = (COMPLETE_NAME, MANIFEST_NAME, PARTIAL_FOLDER)
    return path.is_dir() and any((path / name).exists() for name in names)
