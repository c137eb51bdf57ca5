"""Owns the file of one rank that pages and slots are kept in: its space, its reads and writes.

Knows nothing of what lies where behind the header. A file lives as long as its process: it is
removed at the end, and those of processes that are gone when the next one starts.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from firstlight.schedule.incoming import OVERDUE_SECONDS
from firstlight.units import format_bytes

# Buffers that the system takes in one call, and bytes after which a call must show a sign of life.
MOST_ROWS = 512
MOST_AT_ONCE = 8 * 1024**2


class DiskTier:
    """`size` bytes in a new file of a folder, reserved before anything is written.

    Raises EnvironmentProblem when the folder cannot be used or has not so much room.
    """

    def __init__(self, folder: Path, size: int, layout: Mapping[str, Any]) -> None:
        self._header = Header(MAGIC, VERSION, this_process(), dict(layout))
        owner = self._header.owner
        name = PATTERN.replace("*", f"{owner.host}-{owner.pid}-rank{layout.get('rank', 0)}")
        self.path = folder / name
        self._heard: dict[int, float] = {}  # when the call of a thread last got on
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

    def write(self, offset: int, rows: Sequence[Row]) -> None:
        """Writes rows one behind the other from an offset behind the header. Raises OSError."""
        left = [row.data for row in rows]
        with self._signs() as sign:
            while left:
                done = os.pwritev(self._descriptor, _front(left), HEADER_BYTES + offset)
                offset += done
                left = _behind(left, done)
                sign()

    def read(self, offset: int, rows: Sequence[Row]) -> None:
        """Fills rows, one behind the other, from an offset behind the header. Raises OSError."""
        left = [row.data for row in rows]
        with self._signs() as sign:
            while left:
                done = os.preadv(self._descriptor, _front(left), HEADER_BYTES + offset)
                if done == 0:
                    raise OSError(f"{self.path} is shorter than it was made")
                offset += done
                left = _behind(left, done)
                sign()

    @property
    def is_silent(self) -> bool:
        """Whether some call has got nothing done for OVERDUE_SECONDS."""
        oldest = min(list(self._heard.values()), default=None)
        return oldest is not None and time.monotonic() - oldest > OVERDUE_SECONDS

    @property
    def silence(self) -> str:
        """What to say of a silent disk."""
        return f"{self.path} has given no sign for {OVERDUE_SECONDS:.0f} s"

    def require_signs(self) -> None:
        """Raises OSError while the disk is silent: another call would only hang too."""
        if self.is_silent:
            raise OSError(self.silence)

    @contextmanager
    def _signs(self) -> Iterator[Callable[[], None]]:
        """Notes a call, and with what it yields that the call gets on."""
        self.require_signs()
        thread = threading.get_ident()

        def sign() -> None:
            self._heard[thread] = time.monotonic()

        sign()
        try:
            yield sign
        finally:
            del self._heard[thread]

    def close(self) -> None:
        """Gives file and space back; once is enough, more does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.path.unlink(missing_ok=True)


def _front(buffers: Sequence[memoryview]) -> list[memoryview]:
    """As much of buffers as one call is given."""
    taken: list[memoryview] = []
    room = MOST_AT_ONCE
    for buffer in buffers[:MOST_ROWS]:
        taken.append(buffer[:room])
        room -= taken[-1].nbytes
        if not room:
            break
    return taken


def _behind(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers after so many bytes."""
    left: list[memoryview] = []
    for buffer in buffers:
        if done < buffer.nbytes:
            left.append(buffer[done:])
        done = max(0, done - buffer.nbytes)
    return left
