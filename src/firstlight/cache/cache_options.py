"""Owns how the cache is used and what it notes of each request; records, decided elsewhere."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from firstlight.cache.allocator import PAGED
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.snapshot_points import SnapshotPoints

# A snapshot costs about what the recurrent layers of one decode step do, so this many tokens of
# output between two make it a small part of decoding; the next turn computes them again at most.
TURN_TOKENS = 64


@dataclass
class Holding:
    """Blocks for `capacity` tokens, `num_computed` of them written, the first `num_committed`
    blocks full and clean; where its state is to be kept, if it is recurrent.
    """

    capacity: int
    num_committed: int
    num_computed: int
    points: SnapshotPoints | None = None


@dataclass(frozen=True)
class CacheOptions:
    """How the cache is used. No step computes more than `chunk_tokens` of one request (None: any
    number), which bounds what a group with a window holds of it; `window_blocks` is the number of
    blocks of groups by their window, where it is not that of the others. A running request leaves
    one snapshot in `turn_tokens` of output. `unit_bytes` are those of a block or slot of each group
    on one rank; `clock` gives seconds that never fall. `far` says how many units of each group lie
    in host memory and on disk; without it there are none. `allocator` is `paged`, or `dynamic` for
    blocks of a request that lie in a row.
    """

    chunk_tokens: int | None = None
    window_blocks: Mapping[int, int] = field(default_factory=dict)
    turn_tokens: int = TURN_TOKENS
    unit_bytes: tuple[int, ...] = ()
    clock: Callable[[], float] = time.monotonic
    far: tuple[FarSizes, ...] = ()
    allocator: str = PAGED
