"""Owns what lies outside the device for all cache groups together: parked requests and moves.

Knows no tensor and no policy: whether to park, to fetch or to compute anew is the scheduler's
decision.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from firstlight.cache.cache_group import CacheGroup
from firstlight.cache.far_pool import FarPool, FarSizes
from firstlight.cache.far_prefix import num_spared
from firstlight.cache.moves import Moves, UnitMove
from firstlight.cache.paged_group import PagedGroup
from firstlight.cache.prefix_index import PrefixChain
from firstlight.cache.recurrent_group import RecurrentGroup

# A request that outgrows the device moves at least this part of the device's blocks out at once.
SPILLED_SHARE = 8


class Spilling(NamedTuple):
    """Blocks that a request needs, those of it that are full and clean, and whether the part of the
    device that is left to others is to be free beside them.
    """

    num_needed: int
    num_committed: int
    spares: bool


class Parked(NamedTuple):
    """State of a preempted request behind `num_tokens` tokens that no index names: by group, the
    unit with its last block, if that is not full, or with its recurrent state.
    """

    num_tokens: int
    units: Mapping[int, int]


def make_pools(
    near: Sequence[int], sizes: Sequence[FarSizes], moves: list[UnitMove]
) -> list[FarPool | None]:
    """Returns the pool of each group behind its `near` units; none without `sizes`."""
    if not sizes:
        return [None] * len(near)
    pairs = enumerate(zip(near, sizes, strict=True))
    return [FarPool(group, first, size, moves) for group, (first, size) in pairs]


class Tiers:
    """Units outside the device of all groups, those of parked requests among them.

    `moves` is where all copies are ordered, those within the device too.

    Full blocks of a preempted request stay findable and go out when their place is needed. Only
    what no index names has to be parked: the block it was writing and its recurrent state.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        moves: Moves,
        *,
        block_size: int,
        unit_bytes: Sequence[int],
    ) -> None:
        self._groups, self.moves = groups, moves
        self._block_size, self._unit_bytes = block_size, unit_bytes
        self._parked: dict[str, Parked] = {}

    @property
    def exist(self) -> bool:
        """Whether there is any place outside the device."""
        return any(group.far is not None for group in self._groups)

    @property
    def first_place(self) -> str:
        """Where state goes first."""
        return next(group.far.first_place for group in self._groups if group.far is not None)

    def holds_part(self, chain: PrefixChain, num_shared: int) -> bool:
        """Whether some of the state of so many blocks, which was found, lies outside the device."""
        return any(group.far_units(chain, num_shared) for group in self._groups)

    def far_bytes(self, request_id: str, chain: PrefixChain, num_cached: int) -> Mapping[str, int]:
        """Bytes on one rank, by place, that must come to the device for so many found tokens."""
        sizes: Counter[str] = Counter()
        parked = self._parked.get(request_id)
        held = parked.units if parked is not None and parked.num_tokens == num_cached else {}
        for index, group in enumerate(self._groups):
            if group.far is not None:
                units = [held[index]] if index in held else []
                if not (units and isinstance(group, RecurrentGroup)):
                    units += group.far_units(chain, num_cached // self._block_size)
                for unit in units:
                    sizes[group.far.place_of(unit)] += self._unit_bytes[index]
        return sizes

    def arrivals(self, request_id: str) -> list[UnitMove]:
        """The copies that are under way for a request."""
        return [
            UnitMove(index, arrival.unit, arrival.target)
            for index, group in enumerate(self._groups)
            for arrival in group.arrivals.of(request_id)
        ]

    def park(self, request_id: str, num_tokens: int) -> bool:
        """Copies out what no index names of a request; False, and nothing kept, without room."""
        units: dict[int, int] = {}
        for index, group in enumerate(self._groups):
            unit: int | None = None
            if isinstance(group, RecurrentGroup):
                unit = group.park(request_id)
            elif isinstance(group, PagedGroup) and num_tokens % self._block_size:
                unit = group.park(request_id, num_tokens // self._block_size)
            else:
                continue
            if unit is None:
                self._release(units)
                return False
            units[index] = unit
        self.drop(request_id)
        self._parked[request_id] = Parked(num_tokens, units)
        return True

    def parked(self, request_id: str) -> Parked | None:
        """What is parked of a request."""
        return self._parked.get(request_id)

    def unpark(self, request_id: str, num_tokens: int) -> Mapping[int, int]:
        """Hands the units of a request that resumes behind so many tokens to its caller; gives
        them back if they are of another length.
        """
        parked = self._parked.pop(request_id, None)
        if parked is None:
            return {}
        if parked.num_tokens == num_tokens:
            return parked.units
        self._release(parked.units)
        return {}

    def drop(self, request_id: str) -> None:
        """Gives back what is parked of a request, if anything is."""
        self.unpark(request_id, -1)

    def lose(self, group: int, unit: int) -> set[str]:
        """Notes that the content of a unit is gone; returns the requests it was on its way to, or
        that read it where it lies.
        """
        held = self._groups[group]
        assert held.far is not None, "there is no place outside the device"
        held.far.lose(unit)
        broken = [key for key, parked in self._parked.items() if parked.units.get(group) == unit]
        for request_id in broken:
            self.drop(request_id)
        waiting = held.arrivals.requests
        users = held.far_users(unit) if isinstance(held, PagedGroup) else set()
        return users | {key for key in waiting if unit in {a.unit for a in held.arrivals.of(key)}}

    def spill(self, request_id: str, chain: PrefixChain, asked: Spilling) -> bool:
        """Moves the oldest blocks of a request out of the device as `asked`; False when what it
        needs is not free then.
        """
        paged = {i: one for i, one in enumerate(self._groups) if isinstance(one, PagedGroup)}
        for index, group in paged.items():
            spared = num_spared(group.num_usable) if asked.spares else 0
            missing = min(max(0, asked.num_needed) + spared, group.num_usable) - group.num_free
            if missing <= 0 or group.far is None:
                continue
            first = group.num_far(request_id)
            wanted = max(missing, group.num_usable // SPILLED_SHARE)
            if asked.num_needed > group.num_free and group.far.num_free < wanted:
                self.drop_all()
            blocks = range(first, min(asked.num_committed, first + wanted))
            moved = group.spill(request_id, chain, blocks)
            for place, unit in moved:
                self.moves.renumber(request_id, index, place, unit)
        return all(asked.num_needed <= group.num_free for group in paged.values())

    def drop_all(self) -> None:
        """Gives back what is parked of all requests."""
        for request_id in list(self._parked):
            self.drop(request_id)

    def check_integrity(self) -> None:
        """Recounts the holders of every unit."""
        for index, group in enumerate(self._groups):
            if group.far is not None:
                parked = (one.units[index] for one in self._parked.values() if index in one.units)
                tables = group.far_held if isinstance(group, PagedGroup) else []
                group.far.check_integrity(Counter([*group.arrivals.units, *parked, *tables]))

    @property
    def num_parked(self) -> int:
        """Requests of which something is parked."""
        return len(self._parked)

    def _release(self, units: Mapping[int, int]) -> None:
        for index, unit in units.items():
            pool = self._groups[index].far
            assert pool is not None, "there is no place outside the device"
            pool.release(unit)
