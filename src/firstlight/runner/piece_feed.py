"""Owns how pieces of weights come from where they are kept, for all that is streamed.

Knows threads, files and counts; not which piece comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from firstlight.checkpoint.executor import Job
from firstlight.checkpoint.pieces import HOST_MEMORY, PieceKey, WeightPieces, memory_job
from firstlight.checkpoint.reading_threads import Reading, ReadingThreads
from firstlight.runner.copy_lane import CopyLane
from firstlight.runner.piece_images import PieceImage
from firstlight.runner.protocol import WeightTraffic

# Digests of a layer are compared at its first read and then at every so many-th.
CHECK_EVERY = 16
_CHUNK = 4 * 2**20


@dataclass
class PieceFeed:
    """What reads pieces into host memory, and moves them on. `dtype` is the compute type."""

    pieces: WeightPieces
    threads: ReadingThreads
    lane: CopyLane
    dtype: torch.dtype
    traffic: WeightTraffic = field(default_factory=WeightTraffic)
    image: Callable[[PieceKey], PieceImage] = field(init=False)
    _reads: Counter[PieceKey] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.image = cache(self._image)

    def _image(self, key: PieceKey) -> PieceImage:
        """How the tensors of a piece lie in one run of bytes."""
        return PieceImage(self.pieces.pieces[key], self.dtype)

    def is_checked(self, key: PieceKey) -> bool:
        """Says whether the next read of a piece compares digests: the first one, then a few."""
        count = self._reads[key]
        self._reads[key] = count + 1
        return count == 0 or (count + max(key.layer, 0)) % CHECK_EVERY == 0

    def read_jobs(self, key: PieceKey, tensors: Mapping[str, Tensor], *, check: bool) -> list[Job]:
        """Returns the reads of a piece from its files into host tensors."""
        self.traffic.file_bytes += self.pieces.pieces[key].num_bytes
        return self.pieces.jobs(key, tensors, check=check)

    def copy_jobs(self, key: PieceKey, target: Tensor, source: Tensor) -> list[Job]:
        """Returns copies of a piece within host memory, uint8 [n] both, in chunks."""
        self.traffic.host_bytes += target.numel()
        starts = range(0, target.numel(), _CHUNK)
        return [
            memory_job(key, target[at : at + _CHUNK], source[at : at + _CHUNK]) for at in starts
        ]

    def present_job(self, key: PieceKey, num_bytes: int) -> Job:
        """Returns a job with nothing to do: the piece is where the device can copy it from."""
        self.traffic.host_bytes += num_bytes
        return Job(str(key), HOST_MEMORY, 0, num_bytes, lambda _worker: None)

    def wait(self, reading: Reading) -> None:
        """Waits for a reading; raises what went wrong, or that nothing moves."""
        if not reading.done:
            self.traffic.waits += 1
        self.traffic.wait_seconds += self.threads.wait(reading)

    def take_traffic(self) -> WeightTraffic:
        """Returns what was moved since the last call."""
        taken, self.traffic = self.traffic, WeightTraffic()
        return taken
