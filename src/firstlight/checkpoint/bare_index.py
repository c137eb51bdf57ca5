"""Owns the reading of an index whose files are not here: names, to be judged before a download.

Knows no shape and no type of a tensor; those follow from the model's rules.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from firstlight.checkpoint.json_file import parse_index
from firstlight.checkpoint.reader import INDEX_NAME
from firstlight.errors import TensorError

_PACKED = ".gz"


@dataclass(frozen=True)
class BareIndex:
    """Names of tensors and of the absent files they are in; `total_size` as stated, or None."""

    path: Path
    files: dict[str, str]
    total_size: int | None


def read_bare_index(path: Path) -> BareIndex | None:
    """Returns the index at `path` (a folder or the file, gzipped or not) if none of its files is
    there; None when there is no index, or something to read beside it.

    Raises TensorError when the index is not one.
    """
    index = _find(path)
    if index is None:
        return None
    fields = parse_index(_read(index), index)
    files = fields.get("weight_map")
    if not isinstance(files, dict) or not files:
        return None  # the reader of checkpoints says what is wrong
    try:
        distinct = set(files.values())
    except TypeError:
        return None
    if any(type(file) is not str for file in distinct):
        return None
    if any(Path(f).name != f or (index.parent / f).exists() for f in distinct):
        return None
    metadata = fields.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    return BareIndex(index, files, stated if type(stated) is int else None)


def _find(path: Path) -> Path | None:
    if path.is_dir():
        names = (path / INDEX_NAME, path / (INDEX_NAME + _PACKED))
        return next((name for name in names if name.is_file()), None)
    named = path.name.removesuffix(_PACKED).endswith(".index.json")
    return path if named and path.is_file() else None


def _read(index: Path) -> bytes:
    try:
        raw = index.read_bytes()
        return gzip.decompress(raw) if index.suffix == _PACKED else raw
    except (OSError, EOFError, zlib.error) as error:
        raise TensorError(f"{index}: cannot be read: {error}") from error
