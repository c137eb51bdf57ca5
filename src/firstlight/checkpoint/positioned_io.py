"""Owns exact reads and writes at file offsets; knows nothing of what the bytes mean.

Reads use preadv and never map a file: a page fault over a network file system cannot be watched.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from firstlight.errors import EnvironmentProblem, TensorError
from firstlight.units import format_bytes, format_count

LARGEST_CALL = 16 * 2**20

ReadCall = Callable[[int, "list[memoryview]", int], int]


class InputFile:
    """One file open for reads at offsets, shared by threads; `read_call` is the call used."""

    def __init__(self, path: Path, read_call: ReadCall | None = None) -> None:
        self.path = path
        self._read_call: ReadCall = read_call or os.preadv
        with explained(path, 0, "open"):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

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
                raise TensorError(
                    f"{self.path}: the file ends at byte {format_count(offset + done)}, "
                    f"{format_count(wanted - done)} bytes before the data does; copy it again"
                )
            done += got

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """Returns exactly `num_bytes` from `offset` on."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset)
        return data

    def close(self) -> None:
        """Closes the file; reading afterwards is a programming error."""
        os.close(self._descriptor)


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
