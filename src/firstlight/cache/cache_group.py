"""Owns the records and questions that cache groups share, whatever kind of state they hold.

Knows no tensor, no request and no policy. A unit is what one group hands out: a block of a paged
group, a slot of a recurrent one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from firstlight.cache.arrivals import Arrivals
from firstlight.cache.block_pool import BlockPool
from firstlight.cache.far_pool import FarPool, FarUsage
from firstlight.cache.idle_times import IdleTimes, IdleTotals
from firstlight.cache.prefix_index import PrefixChain

RECURRENT = "recurrent"


class GroupUsage(NamedTuple):
    """Units of one group: usable = used + cached (free, still findable) + empty.

    `hits` counts units found for requests since the start, `idle` those of them nobody else held,
    and the findable ones that were taken for something else. Of the tokens that requests could
    have reused at most (`asked_tokens`) this group alone had `found_tokens`. `unwritten` tokens
    have room in blocks that requests hold and are not computed (internal fragmentation); `stranded`
    units are free and of no use, because another group has none (external). `copied` units were
    moved on the device since the start, and of the free ones `longest_run` lay in a row when that
    was last counted.
    """

    kind: str
    usable: int
    used: int
    cached: int
    empty: int
    hits: int
    idle: IdleTotals = IdleTotals()
    asked_tokens: int = 0
    found_tokens: int = 0
    unwritten_tokens: int = 0
    stranded: int = 0
    unit_bytes: int = 0
    far: tuple[FarUsage, ...] = ()
    copied: int = 0
    longest_run: int = 0

    @property
    def evictions(self) -> int:
        """Findable units that were taken for something else, since the start."""
        return self.idle.num_evicted


def count_units(
    kind: str, pool: BlockPool, *, cached: int, hits: int, idle: IdleTimes
) -> GroupUsage:
    """Counts the units of a pool by condition; `cached` of the free ones can be found."""
    free = pool.num_free
    return GroupUsage(
        kind=kind,
        usable=pool.num_usable,
        used=pool.num_usable - free,
        cached=cached,
        empty=free - cached,
        hits=hits,
        idle=idle.totals,
    )


@dataclass(frozen=True)
class CacheUsage:
    """A picture of the cache: `num_requests` hold blocks; `groups` are in spec order."""

    block_size: int
    num_requests: int
    groups: tuple[GroupUsage, ...]

    @property
    def used_share(self) -> float:
        """Share of the blocks in use, 0 to 1, in the fullest paged group."""
        return max(g.used / g.usable for g in self.groups if g.kind != RECURRENT)

    @property
    def slots(self) -> GroupUsage | None:
        """The recurrent group with most live slots; None without recurrent state."""
        groups = [group for group in self.groups if group.kind == RECURRENT]
        return max(groups, key=lambda group: group.used, default=None)


@dataclass(frozen=True)
class BlockCounts:
    """A number of blocks in each paged group, in spec order."""

    by_group: tuple[int, ...]

    def plus(self, other: "BlockCounts", *, each: int = 0) -> "BlockCounts":
        """The sums, and `each` more in every group."""
        pairs = zip(self.by_group, other.by_group, strict=True)
        return BlockCounts(tuple(a + b + each for a, b in pairs))

    def fits(self, free: "BlockCounts", *, beside: "BlockCounts") -> bool:
        """Whether every group has this many free beside those that are spoken for."""
        groups = zip(self.by_group, free.by_group, beside.by_group, strict=True)
        return all(wanted <= left - kept for wanted, left, kept in groups)


class SlotCopy(NamedTuple):
    """The content of slot `source` of a recurrent group is to be copied to slot `target`."""

    group: int
    source: int
    target: int


class CacheGroup(Protocol):
    """What the manager asks of a group; counts are units of it unless they say tokens or blocks."""

    @property
    def num_usable(self) -> int:
        """Units that requests may hold."""
        ...

    @property
    def num_free(self) -> int:
        """Units that can be taken now, cached ones included."""
        ...

    @property
    def far(self) -> FarPool | None:
        """Its units outside the device."""
        ...

    @property
    def arrivals(self) -> Arrivals:
        """What is on its way to units that requests hold."""
        ...

    def reusable_tokens(self, chain: PrefixChain, at_most: int, *, near: bool = False) -> int:
        """The longest prefix of at most so many tokens whose state this group has; `near`: on the
        device.
        """
        ...

    def far_units(self, chain: PrefixChain, num_shared: int) -> list[int]:
        """Where what `start` needs of the shared blocks lies, if that is outside the device."""
        ...

    def cost(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> int:
        """Free units that `start` would take."""
        ...

    def can_start(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> bool:
        """Whether `start` finds units where they are to lie, if there are as many free."""
        ...

    def start(
        self,
        request_id: str,
        chain: PrefixChain,
        num_shared: int,
        num_blocks: int,
        parked: int | None = None,
    ) -> list[int]:
        """Opens a table for `num_blocks` blocks of tokens, the state of the first `num_shared` of
        them found in the index. `parked` is where state lies that no index names.
        """
        ...

    def arrive(self, request_id: str) -> None:
        """Notes that everything on its way to a request is there."""
        ...

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """Makes room for so many more blocks of tokens; returns the units that were added."""
        ...

    def enter(self, request_id: str, chain: PrefixChain, blocks: range) -> None:
        """Makes what the request holds of these blocks of tokens findable."""
        ...

    def discard(self, request_id: str) -> None:
        """Makes everything the request found or entered unfindable."""
        ...

    def forget(self) -> None:
        """Makes nothing on the device findable; no table may be open."""
        ...

    def release(self, request_id: str) -> None:
        """Closes a table; what is findable of it stays so until it is taken again."""
        ...

    def table(self, request_id: str) -> Sequence[int]:
        """The units of a request in token order."""
        ...

    def usage(self) -> GroupUsage:
        """How many units are in which condition."""
        ...

    def check_integrity(self, num_committed: dict[str, int]) -> None:
        """Recounts; `num_committed` says how many blocks of each request are full and clean."""
        ...
