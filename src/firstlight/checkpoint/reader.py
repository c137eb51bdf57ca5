"""Owns the opening of a checkpoint as published, a folder or one file; knows no model family.

Nothing is unpickled, ever. Every defect the headers show is found before a value is read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from firstlight.checkpoint.file_checkpoint import FileCheckpoint
from firstlight.checkpoint.findings import ERROR, NOTE, WARNING, Finding, refuse_errors
from firstlight.checkpoint.gguf import GgufCheckpoint
from firstlight.checkpoint.json_file import read_index
from firstlight.checkpoint.safetensors_header import Header, read_header
from firstlight.checkpoint.tensor_info import Checkpoint, TensorInfo
from firstlight.checkpoint.torch_distributed import METADATA_NAME, open_distributed
from firstlight.checkpoint.torch_file import TORCH_SUFFIXES, read_torch_header
from firstlight.errors import BadInput, TensorError
from firstlight.units import format_count

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Kind:
    """One kind of file with a header: what it is called and how it is read."""

    name: str
    suffixes: tuple[str, ...]
    index: str
    read: Callable[[Path], Header]


_SAFETENSORS = _Kind("safetensors", (".safetensors",), INDEX_NAME, read_header)
_TORCH = _Kind("pytorch", TORCH_SUFFIXES, "pytorch_model.bin.index.json", read_torch_header)
_KINDS = (_SAFETENSORS, _TORCH)
# What trainers leave beside weights.
_NO_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint folder or one file: safetensors, torch's own, its distributed kind, GGUF.

    Raises TensorError listing every defect that the headers show.
    """
    checkpoint = scan_checkpoint(path)
    refuse_errors(checkpoint.findings, str(path))
    return checkpoint


def scan_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint however damaged, its defects in `findings`; for `inspect`.

    Raises TensorError when there is nothing at `path` that could be read as a checkpoint.
    """
    if not path.exists():
        raise TensorError(f"{path}: no such file or directory")
    if path.is_file():
        return _open_file(path)
    for kind in _KINDS:
        if (path / kind.index).exists():
            return _open_index(path, path / kind.index, kind)
        files = _weights_in(path, kind)
        if len(files) == 1:
            return _open_single(path, files[0], kind)
        if files:
            names = ", ".join(f.name for f in files[:8])
            raise TensorError(
                f"{path}: {len(files)} {kind.name} files ({names}) and no {kind.index} to say "
                "which belong to the model; add the index or name one file"
            )
    return _open_other(path)


def _weights_in(folder: Path, kind: _Kind) -> list[Path]:
    found = (p for p in folder.iterdir() if p.suffix in kind.suffixes) if folder.is_dir() else ()
    return sorted(p for p in found if p.name not in _NO_WEIGHTS)


def _open_single(path: Path, file: Path, kind: _Kind) -> FileCheckpoint:
    return FileCheckpoint(path, kind=kind.name, headers={file: kind.read(file)}, findings=())


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    if path.name == METADATA_NAME:
        return open_distributed(path.parent)
    for kind in _KINDS:
        if path.name.endswith(".index.json") and f"{kind.suffixes[0]}." in path.name:
            return _open_index(path.parent, path, kind)
        if path.suffix in kind.suffixes:
            return _open_single(path, path, kind)
    if path.name.endswith(".index.json"):
        return _open_index(path.parent, path, _SAFETENSORS)
    raise TensorError(f"{path}: not a {_READABLE}")


_READABLE = ".safetensors, .bin, .pt, .pth or .gguf file"


def _open_other(path: Path) -> Checkpoint:
    if (path / METADATA_NAME).is_file():
        return open_distributed(path)
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return GgufCheckpoint(gguf[0])
    if gguf:
        raise TensorError(f"{path}: {len(gguf)} GGUF files; name the one to read")
    if not path.is_dir():
        raise TensorError(f"{path}: neither a folder nor a {_READABLE}")
    raise TensorError(f"{path}: holds no {_READABLE} and no {METADATA_NAME} of torch.distributed")


def _open_index(folder: Path, index: Path, kind: _Kind) -> FileCheckpoint:
    fields = read_index(index)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise TensorError(f"{index}: weight_map is missing or empty; copy the index again")
    findings: list[Finding] = []
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file if type(file) is str else "", set()).add(name)
    outside = [f for f in by_file if Path(f).name != f or f in ("", ".", "..")]
    for name in (name for file in outside for name in sorted(by_file.pop(file))):
        what = f"{weight_map[name]!r} is not a file name"
        findings.append(Finding(ERROR, f"{index}, {name}", what))
    headers: dict[Path, Header] = {}
    for file, names in sorted(by_file.items()):
        if header := _read_shard(folder / file, names, kind, findings):
            headers[folder / file] = header
    findings.extend(_index_remarks(index, headers, set(by_file), fields.get("metadata")))
    return FileCheckpoint(folder, kind=kind.name, headers=headers, findings=findings)


def _read_shard(path: Path, names: set[str], kind: _Kind, findings: list[Finding]) -> Header | None:
    """Reads one file the index names and compares its tensors with the index."""
    if not path.is_file():
        listed = ", ".join(sorted(names)[:3])
        what = f"the index names this file for {len(names)} tensors ({listed} ...); it is absent"
        findings.append(Finding(ERROR, str(path), what, "download this file"))
        return None
    try:
        header = kind.read(path)
    except BadInput as error:
        findings.append(Finding(ERROR, str(path), str(error)))
        return None
    present = {t.name for t in header.tensors}
    broken = {f.where for f in header.findings}
    if not present and header.findings:
        return header  # as a whole it is unreadable and reported as such
    for name in sorted(names - present):
        if f"{path}, {name}" not in broken:
            what = "the index places this tensor here, the file lacks it"
            findings.append(Finding(ERROR, f"{path}, {name}", what, "download this file"))
    for name in sorted(present - names):
        what = "the file holds this tensor, the index does not list it"
        findings.append(Finding(ERROR, f"{path}, {name}", what, "index and file do not match"))
    return header


def _index_remarks(
    index: Path, headers: Mapping[Path, Header], listed: set[str], metadata: object
) -> Iterable[Finding]:
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(t.num_bytes for h in headers.values() for t in h.tensors)
    if isinstance(stated, int) and stated != total:
        what = f"total_size says {format_count(stated)} bytes, the headers {format_count(total)}"
        yield Finding(WARNING, str(index), what)
    suffixes = {Path(name).suffix for name in listed}
    for path in sorted(p for p in index.parent.iterdir() if p.suffix in suffixes):
        if path.is_file() and path.name not in listed:
            yield Finding(NOTE, str(path), "not in the index, so not read")


def count_values(tensors: Iterable[TensorInfo]) -> int:
    """Returns the number of values of some tensors."""
    return sum(prod(t.shape) for t in tensors)
