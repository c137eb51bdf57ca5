"""Owns the writing of one unit and of a whole store directory; knows no source and no family.

Every file appears whole or not at all: a kill leaves either no unit or a finished one.
"""

import fcntl
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from firstlight.checkpoint.digests import ENTRY_TYPE, checksums, close_digest
from firstlight.checkpoint.positioned_io import (
    OutputFile,
    explained,
    free_bytes,
    sync_directory,
    write_whole,
)
from firstlight.checkpoint.store import Manifest, encode_manifest
from firstlight.checkpoint.store_layout import (
    DIGEST_BYTES,
    ENTRY_BYTES,
    GranuleKey,
    UnitRecord,
    block_offsets,
    first_entries,
    granule_bytes,
    granule_keys,
    granule_parts,
    granule_total,
    stride,
)
from firstlight.checkpoint.store_names import (
    COMPLETE_NAME,
    MANIFEST_NAME,
    PARTIAL_FOLDER,
    UNITS_FOLDER,
)
from firstlight.checkpoint.tensor_info import Array
from firstlight.errors import EnvironmentProblem, StoreError
from firstlight.units import format_bytes

_REQUEST_NAME, _LOCK_NAME = "request.json", "lock"


class UnitWriter:
    """Writes the granules of one unit; parts of a granule come in order, each whole or in tiles.

    One hasher per granule stays open, so that nothing is read back.
    """

    def __init__(self, folder: Path, unit: UnitRecord) -> None:
        self._folder, self._unit = folder, unit
        self._offsets, self._firsts = block_offsets(unit), first_entries(unit)
        self._hashers = [blake3() for _ in range(granule_total(unit))]
        self._hashed = np.zeros(granule_total(unit), np.int64)
        self._sums = np.zeros(granule_total(unit), "<u8")
        self._output = OutputFile(folder / f"{unit.name}.bin.partial", unit.size)

    def write(self, key: GranuleKey, *, part: int, first_byte: int, rows: Array) -> None:
        """Writes rows [n, num_bytes] of uint8 into granules key.granule, key.granule + 1, ...

        They are bytes of part number `part`, from `first_byte` (a multiple of 8) on.
        """
        block = self._unit.blocks[key.block]
        place = granule_parts(block, key.granule)[part]
        entry = self._firsts[key.block] + key.expert * block.granules + key.granule
        at = place.offset + first_byte
        base = self._offsets[key.block]
        base += (key.expert * block.granules + key.granule) * stride(block) + at
        self._sums[entry : entry + len(rows)] += checksums(rows, at)
        for number, row in enumerate(np.ascontiguousarray(rows)):
            self._output.write(row.data, base + number * stride(block))
            self._hash(entry + number, at, row.data)

    def _hash(self, entry: int, at: int, data: memoryview) -> None:
        gap = at - int(self._hashed[entry])
        assert gap >= 0, "parts of a granule must be written in order"
        self._hashers[entry].update(bytes(gap))
        self._hashers[entry].update(data)
        self._hashed[entry] = at + data.nbytes

    def finish(self, source_digest: str) -> UnitRecord:
        """Makes the unit durable and visible; returns its record with digests."""
        entries = np.zeros(granule_total(self._unit), ENTRY_TYPE)
        assert ENTRY_TYPE.itemsize == ENTRY_BYTES
        raw = bytearray()
        for entry, key in enumerate(granule_keys(self._unit)):
            size = granule_bytes(self._unit.blocks[key.block], key.granule)
            self._hash(entry, size, memoryview(b""))
            raw += close_digest(self._hashers[entry], self._unit.name, key)
        entries["digest"] = np.frombuffer(bytes(raw), f"V{DIGEST_BYTES}")
        entries["checksum"] = self._sums
        index = entries.tobytes()
        self._output.sync()
        self._output.close()
        name = self._unit.name
        with explained(self._folder, 0, "rename in"):
            os.replace(self._folder / f"{name}.bin.partial", self._folder / f"{name}.bin")
        write_whole(self._folder / f"{name}.idx", index)
        return msgspec.structs.replace(
            self._unit, digest=blake3(index).hexdigest(), source_digest=source_digest
        )

    def abandon(self) -> None:
        """Closes and removes what was written of an unfinished unit."""
        self._output.close()
        (self._folder / f"{self._unit.name}.bin.partial").unlink(missing_ok=True)


@contextmanager
def sole_writer(path: Path) -> Iterator["StoreWriter"]:
    """Gives the writer of a store directory, which is made if absent, to one process at a time.

    Raises StoreError naming the process that has it. A process that dies gives it back.
    """
    folder = path / PARTIAL_FOLDER
    with explained(path, 0, "create"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(path, descriptor)
        yield StoreWriter(path)
    finally:
        os.close(descriptor)


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 200, 0).decode("utf-8", errors="replace").strip()
        raise StoreError(
            f"{path}: another `firstlight shard` ({owner or 'still starting'}) is writing there; "
            "let it finish or stop it, or choose another directory"
        ) from error
    except OSError:
        return  # a file system without locks: units and notes still appear whole or not at all
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)


class StoreWriter:
    """Writes a store directory unit by unit and remembers, on disk, which units are done.

    Different units may be written by different threads at the same time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = path / PARTIAL_FOLDER
        self._units = path / UNITS_FOLDER
        with explained(path, 0, "create"):
            self._units.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)

    def claim(self, request: dict[str, str]) -> None:
        """Notes what is being made. Raises StoreError in a directory begun for another request."""
        file = self._partial / _REQUEST_NAME
        encoded = msgspec.json.encode(request, order="sorted")
        if not file.exists():
            strangers = [p.name for p in self._units.iterdir() if p.suffix in (".bin", ".idx")]
            if strangers:
                raise StoreError(
                    f"{self.path}: holds unit files ({', '.join(sorted(strangers)[:4])}) of "
                    "unknown origin; choose an empty directory"
                )
            write_whole(file, encoded)
        elif file.read_bytes() != encoded:
            raise StoreError(
                f"{self.path}: was begun from another source or with other options; remove it or "
                "choose another directory"
            )

    def check_space(self, units: list[UnitRecord]) -> tuple[int, int]:
        """Returns (bytes still needed, bytes free). Raises EnvironmentProblem if they don't fit."""
        open_units = [u for u in units if self.finished(u) is None]
        needed = sum(u.size + granule_total(u) * ENTRY_BYTES for u in open_units) + 64 * 2**10
        free = free_bytes(self.path)
        stale = sum(p.stat().st_size for p in self._units.glob("*.partial"))
        if needed > free + stale:
            raise EnvironmentProblem(
                f"{self.path}: the store needs {format_bytes(needed)} more, {format_bytes(free)} "
                f"are free there; {format_bytes(needed - free)} are missing. Free some space or "
                "choose another directory. Weights can also be loaded from the checkpoint directly"
            )
        return needed, free

    def finished(self, unit: UnitRecord) -> UnitRecord | None:
        """Returns the full record of a unit an earlier run has finished, else None."""
        file = self._partial / f"{unit.name}.json"
        if not file.exists():
            return None
        record = msgspec.json.decode(file.read_bytes(), type=UnitRecord)
        same = msgspec.structs.replace(record, digest="", source_digest="") == unit
        paths = (self._units / f"{unit.name}.bin", self._units / f"{unit.name}.idx")
        return record if same and all(p.is_file() for p in paths) else None

    def begin(self, unit: UnitRecord) -> UnitWriter:
        """Opens a unit for writing from its first byte."""
        return UnitWriter(self._units, unit)

    def remember(self, record: UnitRecord) -> None:
        """Notes that a unit is finished."""
        write_whole(self._partial / f"{record.name}.json", msgspec.json.encode(record))

    def complete(self, manifest: Manifest) -> None:
        """Writes the manifest and, last, COMPLETE; then forgets the notes."""
        raw = encode_manifest(manifest)
        write_whole(self.path / MANIFEST_NAME, raw)
        for folder, _, _ in os.walk(self.path):
            sync_directory(Path(folder))
        write_whole(self.path / COMPLETE_NAME, blake3(raw).hexdigest().encode() + b"\n")
        forget_notes(self.path)


def forget_notes(path: Path) -> None:
    """Removes the notes of a finished conversion."""
    shutil.rmtree(path / PARTIAL_FOLDER, ignore_errors=True)
