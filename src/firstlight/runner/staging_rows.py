"""Owns host memory that units pass through on their way to and from a disk, lent piece by piece.

Knows nothing of what is in it. Memory once taken is kept: pages touched for the first time cost
more than what is then written to them.
"""

import threading

import numpy as np

from firstlight.runner.unit_bytes import Row


class StagingRows:
    """Lends at most `limit` bytes at once, or one larger piece."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lent = 0
        self._kept: list[Row] = []
        self._change = threading.Condition()

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far that are not given back to the system."""
        with self._change:
            return self._lent + self._kept_bytes

    def lend(self, size: int, seconds: float | None = None) -> Row:
        """Returns uint8 [size], once so much may be lent; its content is undefined.

        Raises TimeoutError after `seconds` of waiting, MemoryError when the host has no more.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._has_room(size), seconds):
                raise TimeoutError(f"{self._lent} bytes are not given back in time")
            self._lent += size
            for number, piece in enumerate(self._kept):
                if piece.nbytes == size:
                    return self._kept.pop(number)
            while self._kept and self._lent + self._kept_bytes > self._limit:
                self._kept.pop(0)
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            with self._change:
                self._lent -= size
                self._change.notify_all()
            raise

    def give_back(self, piece: Row) -> None:
        """Takes back what was lent."""
        with self._change:
            self._lent -= piece.nbytes
            if self._lent + self._kept_bytes + piece.nbytes <= self._limit:
                self._kept.append(piece)
            self._change.notify_all()

    @property
    def _kept_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._kept)

    def _has_room(self, size: int) -> bool:
        return not self._lent or self._lent + size <= self._limit
