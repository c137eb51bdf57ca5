"""Owns exact reads and writes at file offsets; knows nothing of what the bytes mean.

Reads use preadv and never map a file: a page fault over a network file system cannot be watched.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from firstlight.errors import EnvironmentProblem, StoreError, TensorError
from firstlight.units import format_bytes, format_count

LARGEST_CALL = 16 * 2**20
DIRECT_ALIGNMENT = 4096
_MOST_BUFFERS = 1024  # of one call, as POSIX systems have it

Staging = Callable[[int], memoryview]
ReadCall = Callable[[int, "list[memoryview]", int], int]


class InputFile:
    """One file open for reads at offsets, shared by threads; `read_call` is the call used.

    `direct` has `read_staged` pass by the page cache, where the file system allows it.
    """

    def __init__(
        self, path: Path, read_call: ReadCall | None = None, *, direct: bool = False
    ) -> None:
        self.path = path
        self._read_call: ReadCall = read_call or os.preadv
        with explained(path, 0, "open"):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = _open_direct(path) if direct else -1

    @property
    def direct(self) -> bool:
        """Says whether `read_staged` passes by the page cache."""
        return self._direct >= 0

    def is_cached(self, offset: int) -> bool:
        """Says whether the page at an offset is in memory; True where the system cannot tell."""
        try:
            os.preadv(self._descriptor, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0))
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def read_staged(self, pages: Staging, offset: int, num_bytes: int) -> memoryview:
        """Returns the bytes from `offset` on in memory of `pages(n)`, which begins at a page."""
        if self._direct < 0:
            buffer = pages(num_bytes)
            self.read_into(buffer, offset)
            return buffer
        base = offset // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        shift = offset - base
        wanted = shift + num_bytes
        whole = pages(-(-wanted // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
        done = 0
        while done < wanted:
            with explained(self.path, base + done, "read"):
                got = os.preadv(self._direct, [whole[done : done + LARGEST_CALL]], base + done)
            done += got
            if done < wanted and (got == 0 or done % DIRECT_ALIGNMENT):
                raise self._ended(base + done, wanted - done)
        return whole[shift:wanted]

    def _ended(self, at: int, missing: int) -> TensorError:
        return TensorError(
            f"{self.path}: the file ends at byte {format_count(at)}, {format_count(missing)} bytes "
            "before the data does; copy it again"
        )

    def size(self) -> int:
        """Returns the size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills the whole buffer from `offset` on.

        Raises TensorError when the file ends before, EnvironmentProblem when the device fails.
        """
        done, wanted = 0, buffer.nbytes
        while done < wanted:
            view = buffer[done : done + LARGEST_CALL]
            with explained(self.path, offset + done, "read"):
                got = self._read_call(self._descriptor, [view], offset + done)
            if got == 0:
                raise self._ended(offset + done, wanted - done)
            done += got

    def read_scattered(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills buffers one after the other from `offset` on, in as few calls as the system allows.

        Raises what `read_into` raises.
        """
        at = offset
        for first in range(0, len(buffers), _MOST_BUFFERS):
            batch = list(buffers[first : first + _MOST_BUFFERS])
            with explained(self.path, at, "read"):
                got = self._read_call(self._descriptor, batch, at)
            for buffer in batch:  # what a short read left open
                have = min(max(got, 0), buffer.nbytes)
                if have < buffer.nbytes:
                    self.read_into(buffer[have:], at + have)
                got -= have
                at += buffer.nbytes

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """Returns exactly `num_bytes` from `offset` on."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return data

    def close(self) -> None:
        """Closes the file; reading afterwards is a programming error."""
        os.close(self._descriptor)
        if self._direct >= 0:
            os.close(self._direct)


def _open_direct(path: Path) -> int:
    """Returns a descriptor that passes by the page cache, -1 where the file system has none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return -1


class OutputFile:
    """One file of known size written at offsets; its space is reserved when it is opened."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        with explained(path, 0, "create"):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
        try:
            if size:
                with explained(path, 0, "reserve", size):
                    os.posix_fallocate(self._descriptor, 0, size)
        except BaseException:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`. Raises EnvironmentProblem when the device is full."""
        done = 0
        while done < data.nbytes:
            with explained(self.path, offset + done, "write", data.nbytes - done):
                view = data[done : done + LARGEST_CALL]
                done += os.pwritev(self._descriptor, [view], offset + done)

    def sync(self) -> None:
        """Returns when the bytes are on the device."""
        with explained(self.path, self.size, "flush"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; once is enough, more does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small file so that it exists whole or not at all, and survives a power cut."""
    partial = path.with_name(path.name + ".partial")
    output = OutputFile(partial, len(data))
    try:
        output.write(memoryview(data), 0)
        output.sync()
    finally:
        output.close()
    with explained(path, 0, "rename"):
        os.replace(partial, path)
    sync_directory(path.parent)


def refuse_occupied(path: Path) -> None:
    """Raises StoreError unless `path` is an empty directory or nothing yet."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise StoreError(f"{path}: must be an empty or new directory")


def sync_directory(path: Path) -> None:
    """Returns when the names in a directory are on the device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path, offset: int, verb: str, num_bytes: int = 0) -> Iterator[None]:
    """Turns an OSError into EnvironmentProblem naming file, offset, bytes wanted and bytes free."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"{path}: cannot {verb} at byte {format_count(offset)}: {reason}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text = (
                f"{path}: no room to {verb} {format_bytes(num_bytes)} at byte "
                f"{format_count(offset)}: {reason}; {format_bytes(free_bytes(path.parent))} are "
                "free there. Free some space or choose another directory, then run again: "
                "finished units are kept"
            )
        raise EnvironmentProblem(text) from error


def free_bytes(directory: Path) -> int:
    """Returns the bytes a user may still write on the file system of a directory."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
