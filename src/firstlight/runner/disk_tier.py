"""Owns the file of one rank that pages and slots are kept in: its space, its reads and writes.

Knows nothing of what lies where behind the header. A file lives as long as its process: it is
removed at the end, and those of processes that are gone when the next one starts.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from firstlight.errors import EnvironmentProblem
from firstlight.runner.tier_files import (
    HEADER_BYTES,
    MAGIC,
    PATTERN,
    VERSION,
    Header,
    check_header,
    require_room,
    this_process,
)
from firstlight.runner.unit_bytes import Row
from firstlight.units import format_bytes


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
            require_room(folder, size)
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
