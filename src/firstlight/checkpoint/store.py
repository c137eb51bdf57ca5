"""Owns the manifest of a store and the opening of one; knows no tensor library and no layout.

A directory is a store only when COMPLETE names the digest of its manifest.
"""

from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from firstlight.checkpoint.digests import ENTRY_TYPE, Entries
from firstlight.checkpoint.findings import ERROR, Finding, refuse_errors
from firstlight.checkpoint.store_layout import UnitRecord, granule_total
from firstlight.checkpoint.store_names import (
    ANSWERS_FOLDER,
    COMPLETE_NAME,
    MANIFEST_NAME,
    MODEL_FOLDER,
    UNITS_FOLDER,
    refuse_unfinished,
)
from firstlight.errors import DigestMismatch, StoreError
from firstlight.units import format_count

_REMAKE = "make the store again"
FORMAT_NAME = "firstlight-store"
FORMAT_VERSION = 1


class SourceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a store came from. `headers_digest` covers names, sizes and headers of the files,
    `content_digest` every byte read from them; `stored` counts tensors by their form there."""

    name: str
    format: str
    headers_digest: str
    content_digest: str
    stored: dict[str, int]


class CoverageRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The proof that granules hold every element of every source tensor once."""

    tensors: int
    values: int
    payload_bytes: int
    padding_bytes: int


class TiedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source tensor not stored because it was proven equal to another one, bit for bit."""

    source: str
    same_as: str


class LayerError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a layer strayed when its matrices were quantised, as a share of what it changes;
    `kept`: it stays as it was."""

    layer: int
    error: float
    kept: bool


class PrecisionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How layers were chosen to stay at higher precision. `budget` is the share of the saved bytes
    given up for them, `samples` the number of tokens of each sample text."""

    codec: str
    budget: float
    samples: dict[str, int]
    layers: tuple[LayerError, ...]

    @property
    def kept(self) -> frozenset[int]:
        """The layers that stay as they were."""
        return frozenset(one.layer for one in self.layers if one.kept)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a reader needs to compute every offset, and where the weights came from."""

    format: str
    version: int
    creator: str
    family: str
    rule_version: int
    codec: str
    source: SourceRecord
    licence: str
    units: tuple[UnitRecord, ...]
    coverage: CoverageRecord
    tied: tuple[TiedRecord, ...] = ()
    files: dict[str, str] = {}
    answers: dict[str, str] = {}
    precision: PrecisionRecord | None = None


class Store:
    """A complete store. `open_store` makes one."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @cached_property
    def units(self) -> dict[str, UnitRecord]:
        """The units by name, in load order."""
        return {unit.name: unit for unit in self.manifest.units}

    def bin_path(self, unit: str) -> Path:
        """Returns the file that holds a unit's granules."""
        return self.path / UNITS_FOLDER / f"{unit}.bin"

    def entries(self, unit: str) -> Entries:
        """Returns digest and checksum of every granule of a unit, checked against the manifest.

        Raises DigestMismatch when the .idx file is not the one the manifest names.
        """
        path = self.path / UNITS_FOLDER / f"{unit}.idx"
        raw = path.read_bytes()
        if blake3(raw).hexdigest() != self.units[unit].digest:
            raise DigestMismatch(f"{path}: differs from the digest in the manifest; make it again")
        return np.frombuffer(raw, ENTRY_TYPE)


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the bytes of manifest.json: stable, readable, one newline at the end."""
    return (
        msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"
    )


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a complete store.

    Raises StoreError when the directory is not one: absent, unfinished, of another version.
    """
    if not path.is_dir():
        raise StoreError(f"{path}: no such directory")
    refuse_unfinished(path)
    complete, file = path / COMPLETE_NAME, path / MANIFEST_NAME
    try:
        raw, stated = file.read_bytes(), complete.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{file}: cannot be read: {error}") from error
    if blake3(raw).hexdigest() != stated:
        raise StoreError(
            f"{file}: differs from the digest in {COMPLETE_NAME}; make the store again"
        )
    return _decode(file, raw)


def _decode(file: Path, raw: bytes) -> Manifest:
    try:
        head = msgspec.json.decode(raw)
        if not isinstance(head, dict) or head.get("format") != FORMAT_NAME:
            raise StoreError(f"{file}: is not the manifest of a store")
        if head.get("version") != FORMAT_VERSION:
            raise StoreError(
                f"{file}: store version {head.get('version')!r}; this program reads "
                f"{FORMAT_VERSION}. Make the store again, or use the version that made it"
            )
        return msgspec.json.decode(raw, type=Manifest)
    except msgspec.DecodeError as error:
        raise StoreError(f"{file}: {error}") from error


def size_findings(store: Store) -> list[Finding]:
    """Compares the sizes of the unit files with the manifest; reads none of them."""
    found = []
    for unit in store.manifest.units:
        index_size = granule_total(unit) * ENTRY_TYPE.itemsize
        path = store.bin_path(unit.name)
        wanted = {path: unit.size, path.with_suffix(".idx"): index_size}

        for path, size in wanted.items():
            if not path.is_file():
                found.append(Finding(ERROR, str(path), "the file is absent", _REMAKE))
            elif path.stat().st_size != size:
                what = (
                    f"holds {format_count(path.stat().st_size)} bytes, the manifest says "
                    f"{format_count(size)}"
                )
                found.append(Finding(ERROR, str(path), what, _REMAKE))
    return found


def digest_files(folder: Path) -> dict[str, str]:
    """Returns the BLAKE3 of every file below a folder by its relative name; {} without a folder."""
    if not folder.is_dir():
        return {}
    return {
        path.relative_to(folder).as_posix(): blake3(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def file_findings(store: Store, *, strangers: bool = True) -> list[Finding]:
    """Compares the model and answer files with their digests; `strangers` are files that the
    manifest does not name."""
    recorded = {
        **{f"{MODEL_FOLDER}/{n}": d for n, d in store.manifest.files.items()},
        **{f"{ANSWERS_FOLDER}/{n}": d for n, d in store.manifest.answers.items()},
    }
    present = {
        f"{folder}/{name}": digest
        for folder in (MODEL_FOLDER, ANSWERS_FOLDER)
        for name, digest in digest_files(store.path / folder).items()
    }
    found = []
    for name in sorted(recorded.keys() | present.keys()):
        where = str(store.path / name)
        if name not in present:
            found.append(Finding(ERROR, where, "the file is absent", _REMAKE))
        elif name in recorded and recorded[name] != present[name]:
            what = "differs from its digest in the manifest"
            found.append(Finding(ERROR, where, what, _REMAKE))
        elif name not in recorded and strangers:
            found.append(Finding(ERROR, where, "the manifest knows it not"))
    return found


def open_store(path: Path) -> Store:
    """Opens a complete store: unit files have the sizes the manifest states, and the files of model
    and answers their digests. Unit files are compared with theirs when they are read.

    Raises StoreError otherwise, every file named.
    """
    store = Store(path, read_manifest(path))
    findings = [*size_findings(store), *file_findings(store, strangers=False)]
    refuse_errors(findings, str(path), kind=StoreError)
    return store
