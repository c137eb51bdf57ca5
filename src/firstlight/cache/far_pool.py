"""Owns the units of one cache group outside the device: what they hold, and what goes further out.

Knows no request, no policy and no tensor. Units of all places share one numbering, so that a table
may name any of them:

    ids       0 ....... D-1 | D ........ D+H-1 | D+H ...... D+H+K-1
    place     device        | host             | disk
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from firstlight.cache.block_pool import BlockPool
from firstlight.cache.moves import UnitMove
from firstlight.cache.prefix_index import PrefixIndex, PrefixKey

HOST, DISK = "host", "disk"


class FarSizes(NamedTuple):
    """Units of one cache group in host memory and on disk."""

    host: int
    disk: int


class FarUsage(NamedTuple):
    """Units of one group in one place: usable = held + cached (findable, held by nobody) + empty.

    Since the start: `hits` were found for requests, `stored` were written, `dropped` were findable
    and given up for others, `lost` could not be written or read. `touched` units, those of
    the lowest numbers, ever held anything.
    """

    place: str
    usable: int
    held: int
    cached: int
    empty: int
    hits: int
    stored: int
    dropped: int
    lost: int
    touched: int = 0


class Place:
    """Units [first, first + size) and what happened to them."""

    def __init__(self, name: str, first: int, size: int) -> None:
        self.name, self.first, self.size = name, first, size
        self.pool = BlockPool(size + 1)  # its block 0 stands for no unit
        self.num_cached = self.num_touched = 0
        self.events: Counter[str] = Counter()

    def local(self, unit: int) -> int:
        """The number of a unit in the pool."""
        return unit - self.first + 1

    def usage(self) -> FarUsage:
        """How many units are in which condition."""
        free, events = self.pool.num_free, self.events
        return FarUsage(
            self.name,
            self.size,
            held=self.size - free,
            cached=self.num_cached,
            empty=free - self.num_cached,
            **{name: events[name] for name in ("hits", "stored", "dropped", "lost")},
            touched=self.num_touched,
        )


class FarPool:
    """Content of a group by key, and content of requests by unit, in host memory and on disk.

    A unit with holders stays where it is. One without is cached while its key is known; the one
    unused longest goes from host to disk when its place is needed, and from disk for good. Every
    change of place is appended to `moves`, to be carried out in this order.
    """

    def __init__(self, group: int, first: int, sizes: FarSizes, moves: list[UnitMove]) -> None:
        self.first, self._group, self._moves = first, group, moves
        sizes_of = ((HOST, first, sizes.host), (DISK, first + sizes.host, sizes.disk))
        self._places = [Place(*place) for place in sizes_of if place[2]]
        self._index = PrefixIndex()
        self._lengths: dict[PrefixKey, int] = {}

    @property
    def num_free(self) -> int:
        """Units that can be taken now."""
        return sum(place.pool.num_free for place in self._places)

    @property
    def num_usable(self) -> int:
        """Units of all places."""
        return sum(place.size for place in self._places)

    @property
    def first_place(self) -> str:
        """`host`, or `disk` where there is no host memory."""
        return self._places[0].name

    @property
    def lengths(self) -> set[int]:
        """The lengths that content was kept with."""
        return set(self._lengths.values())

    def find(self, key: PrefixKey) -> int | None:
        """The unit with this content, or None."""
        return self._index.find(key)

    def place_of(self, unit: int) -> str:
        """`host` or `disk`."""
        return self._place(unit).name

    def keep(self, key: PrefixKey, source: int, *, length: int = 0) -> None:
        """Keeps what a unit of the device holds, which is about to be taken for something else."""
        unit = self._index.find(key)
        if unit is not None:
            self._touch(unit)
            return
        unit = self.store(source)
        if unit is not None:
            self._index.enter(key, unit)
            if length:
                self._lengths[key] = length
            self.release(unit)

    def store(self, source: int) -> int | None:
        """Copies a unit of the device out, into one that its caller holds; None without room."""
        unit = self._take(0)
        if unit is not None:
            self._moves.append(UnitMove(self._group, source, unit))
        return unit

    def hold(self, unit: int) -> int:
        """Adds a holder to a unit that was found, and returns the unit."""
        place = self._place(unit)
        place.events["hits"] += 1
        self._share(place, unit)
        return unit

    def take_over(self, key: PrefixKey, source: int) -> int | None:
        """Holds content that a unit of the device has, copied if need be; None without room."""
        unit = self._index.find(key)
        if unit is not None:
            self._share(self._place(unit), unit)
            return unit
        unit = self.store(source)
        if unit is not None:
            self._index.enter(key, unit)
        return unit

    def key_of(self, unit: int) -> PrefixKey | None:
        """The content of a unit, or None when it is not known."""
        return self._index.key_of(unit)

    def release(self, unit: int) -> None:
        """Takes a holder away; content with a key is kept until its place is needed."""
        place = self._place(unit)
        local, findable = place.local(unit), unit in self._index
        place.pool.release(local, keep=findable)
        place.num_cached += findable and place.pool.references(local) == 0

    def lose(self, unit: int) -> None:
        """Notes that the content of a unit is gone; its holders must be told by the caller."""
        place = self._place(unit)
        place.events["lost"] += 1
        if self._forget(unit) is not None and place.pool.references(place.local(unit)) == 0:
            place.num_cached -= 1
            place.pool.reuse_next(place.local(unit))

    def discard(self, key: PrefixKey) -> None:
        """Makes content unfindable."""
        unit = self._index.find(key)
        if unit is not None:
            place = self._place(unit)
            self._forget(unit)
            if place.pool.references(place.local(unit)) == 0:
                place.num_cached -= 1
                place.pool.reuse_next(place.local(unit))

    def forget(self) -> None:
        """Makes nothing findable; no unit may be held."""
        for unit in self._index.clear():
            place = self._place(unit)
            place.pool.reuse_next(place.local(unit))
            place.num_cached -= 1
        self._lengths.clear()

    def usage(self) -> tuple[FarUsage, ...]:
        """How many units are in which condition, by place."""
        return tuple(place.usage() for place in self._places)

    def check_integrity(self, holders: Counter[int]) -> None:
        """Recounts against how often each unit is held."""
        self._index.check_integrity()
        seen: set[int] = set()
        for place in self._places:
            place.pool.check_integrity()
            cached = 0
            for unit in range(place.first, place.first + place.size):
                seen.add(unit)
                counted, kept = holders[unit], place.pool.references(place.local(unit))
                assert counted == kept, f"unit {unit}: {counted} holders, {kept} references kept"
                cached += unit in self._index and not kept
            assert cached == place.num_cached, f"{cached} cached, {place.num_cached} counted"
        assert set(holders) <= seen, "a unit is held that no place has"
        assert self._lengths.keys() <= set(self._keys()), "a length without content"

    def _keys(self) -> Iterator[PrefixKey]:
        units = (u for place in self._places for u in range(place.first, place.first + place.size))
        return (key for unit in units if (key := self._index.key_of(unit)) is not None)

    def _take(self, level: int) -> int | None:
        """A unit of this place or one further out; what it held goes out by one place."""
        for number, place in enumerate(self._places[level:], start=level):
            if place.pool.num_free:
                return self._take_from(place, number)
        return None

    def _take_from(self, place: Place, level: int) -> int:
        unit = place.pool.acquire() + place.first - 1
        place.num_touched = max(place.num_touched, place.local(unit))
        place.events["stored"] += 1
        key = self._index.key_of(unit)
        if key is not None:
            place.num_cached -= 1
            length = self._forget(unit)
            further = self._take(level + 1)
            if further is None:
                place.events["dropped"] += 1
            else:
                self._moves.append(UnitMove(self._group, unit, further))
                self._index.enter(key, further)
                if length:
                    self._lengths[key] = length
                self.release(further)
        return unit

    def _forget(self, unit: int) -> int | None:
        """Makes a unit unfindable; returns the length of its content, None when it had no key."""
        key = self._index.key_of(unit)
        if key is None:
            return None
        self._index.discard(unit)
        return self._lengths.pop(key, 0)

    def _share(self, place: Place, unit: int) -> None:
        local = place.local(unit)
        place.num_cached -= unit in self._index and place.pool.references(local) == 0
        place.pool.share(local)

    def _touch(self, unit: int) -> None:
        """Notes that content is worth keeping longer."""
        self._share(self._place(unit), unit)
        self.release(unit)

    def _place(self, unit: int) -> Place:
        place = next((p for p in self._places if p.first <= unit < p.first + p.size), None)
        assert place is not None, f"unit {unit} is on the device"
        return place
