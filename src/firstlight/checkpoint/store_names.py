"""Owns what a store is called on disk and how one is recognised; light enough for every process."""

from pathlib import Path

from firstlight.errors import StoreError

MANIFEST_NAME = "manifest.json"
COMPLETE_NAME = "COMPLETE"
UNITS_FOLDER, MODEL_FOLDER, ANSWERS_FOLDER = "units", "model", "answers"
PARTIAL_FOLDER = "partial"


def is_store(path: Path) -> bool:
    """Says whether a directory is a store, finished or not (and not a checkpoint)."""
    names = (COMPLETE_NAME, MANIFEST_NAME, PARTIAL_FOLDER)
    return path.is_dir() and any((path / name).exists() for name in names)


def refuse_unfinished(path: Path) -> None:
    """Raises StoreError for a directory that is no store, or one that is not finished."""
    if (path / COMPLETE_NAME).is_file():
        return
    if is_store(path):
        raise StoreError(
            f"{path}: has no {COMPLETE_NAME}, so it is an unfinished store; run "
            f"`firstlight shard SOURCE {path}` again with the same options: it goes on where it "
            "stopped"
        )
    raise StoreError(
        f"{path}: has no {COMPLETE_NAME}, so it is not a store; make one with `firstlight shard`"
    )
