"""Owns the file of one rank that pages and slots are kept in: its header, its space, its end.

Knows nothing of what lies where behind the header. A file lives as long as its process: it is
removed at the end, and those of processes that are gone when the next one starts.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from firstlight.checkpoint.positioned_io import free_bytes
from firstlight.errors import BadInput, EnvironmentProblem
from firstlight.runner.unit_bytes import Row
from firstlight.units import format_bytes

HEADER_BYTES = 4096
MAGIC = "firstlight cache tier"
# Raised whenever bytes behind the header would be read differently.
VERSION = 1
PATTERN = "firstlight-tier-*.bin"


class Owner(msgspec.Struct, frozen=True):
    """The process a file belongs to."""

    host: str
    pid: int
    started: float

    def is_alive(self) -> bool:
        """Whether it may still use its file; always true of a process on another machine."""
        if self.host != socket.gethostname():
            return True
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class Header(msgspec.Struct, frozen=True):
    """What a file is: `layout` says how its bytes are to be read."""

    magic: str
    version: int
    owner: Owner
    layout: dict[str, Any]


class DiskTier:
    """`size` bytes in a new file of a folder, reserved before anything is written.

    Raises EnvironmentProblem when the folder cannot be used or has not so much room.
    """

    def __init__(self, folder: Path, size: int, layout: Mapping[str, Any]) -> None:
        self._header = Header(MAGIC, VERSION, this_process(), dict(layout))
        owner = self._header.owner
        name = PATTERN.replace("*", f"{owner.host}-{owner.pid}-rank{layout.get('rank', 0)}")
        self.path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_stale(folder)
            self._require_room(folder, size)
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise EnvironmentProblem(f"{folder}: cannot keep a cache tier here: {error}") from error
        try:
            os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + size)
            data = msgspec.json.encode(self._header)
            os.pwrite(self._descriptor, data.ljust(HEADER_BYTES, b" "), 0)
        except OSError as error:
            self.close()
            raise EnvironmentProblem(
                f"{self.path}: cannot reserve {format_bytes(size)}: {error.strerror}; lower disk= "
                "in --tiers or name another folder"
            ) from error
        check_header(self.path, layout)

    def write(self, offset: int, row: Row) -> None:
        """Writes a row at an offset behind the header. Raises OSError."""
        data = row.data
        done = 0
        while done < data.nbytes:
            done += os.pwritev(self._descriptor, [data[done:]], HEADER_BYTES + offset + done)

    def read(self, offset: int, row: Row) -> None:
        """Fills a row from an offset behind the header. Raises OSError."""
        data = row.data
        done = 0
        while done < data.nbytes:
            got = os.preadv(self._descriptor, [data[done:]], HEADER_BYTES + offset + done)
            if got == 0:
                raise OSError(f"{self.path} is shorter than it was made")
            done += got

    def close(self) -> None:
        """Gives file and space back; once is enough, more does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.path.unlink(missing_ok=True)

    @staticmethod
    def _require_room(folder: Path, size: int) -> None:
        free = free_bytes(folder)
        if free < size:
            raise EnvironmentProblem(
                f"{folder}: the disk tier of a rank takes {format_bytes(size)}, "
                f"{format_bytes(free)} are free there; lower disk= in "
                "--tiers or name another folder"
            )


def this_process() -> Owner:
    """Returns who owns a file made here."""
    process = psutil.Process()
    return Owner(socket.gethostname(), process.pid, process.create_time())


def read_header(path: Path) -> Header:
    """Returns the header of a file. Raises BadInput when it is none that this version reads."""
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.read(HEADER_BYTES), type=Header)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput(f"{path} is no cache tier of firstlight: {error}") from error
    if header.magic != MAGIC or header.version != VERSION:
        raise BadInput(
            f"{path} is a cache tier of version {header.version}; this program reads {VERSION}. "
            "Remove it, or name another folder"
        )
    return header


def check_header(path: Path, layout: Mapping[str, Any]) -> None:
    """Raises BadInput naming every part of the layout that is not as this rank would read it."""
    found = read_header(path).layout
    wanted = msgspec.json.decode(msgspec.json.encode(dict(layout)))
    names = sorted(found.keys() | wanted.keys())
    wrong = [name for name in names if found.get(name) != wanted.get(name)]
    if wrong:
        parts = ", ".join(f"{n} {found.get(n)!r}, not {wanted.get(n)!r}" for n in wrong)
        raise BadInput(f"{path} was made for another layout: {parts}. Its pages are not read")


def remove_stale(folder: Path) -> list[Path]:
    """Removes files of processes of this machine that are gone; returns their paths."""
    removed = []
    for path in sorted(folder.glob(PATTERN)):
        try:
            is_stale = not read_header(path).owner.is_alive()
        except BadInput:
            continue  # not ours to judge
        if is_stale:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed
