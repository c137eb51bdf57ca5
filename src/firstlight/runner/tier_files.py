"""Owns the headers of cache tier files, whose they are, and whether a folder has room for more.

Knows nothing of what lies behind a header. Needs no torch, so that a start can ask before anything
is loaded.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from firstlight.errors import BadInput, EnvironmentProblem
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


def require_room(folder: Path, size: int, *, ranks: int = 1) -> None:
    """Removes what dead processes left in a folder, and raises EnvironmentProblem unless `size`
    bytes for each rank are free where it is, or will be.
    """
    remove_stale(folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        status = os.statvfs(existing)
    except OSError as error:
        raise EnvironmentProblem(f"{folder}: cannot keep a cache tier here: {error}") from error
    free = status.f_bavail * status.f_frsize
    if free < size * ranks:
        raise EnvironmentProblem(
            f"{folder}: the disk tiers of {ranks} ranks take {format_bytes(size * ranks)}, "
            f"{format_bytes(free)} are free there; lower disk= in --tiers or name another folder"
        )
