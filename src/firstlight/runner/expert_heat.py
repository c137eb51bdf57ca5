"""Owns which experts are in memory: what was used often of late stays, the coldest makes room.

Knows no tensor and no file; a key names an expert, a slot is a number.

Heat is a count of uses that halves every so many steps. Instead of cooling everything, each step
adds more than the one before: heats compare the same, and only what is used is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

HALF_LIFE_STEPS = 64
_LARGEST = 1e100

Key = TypeVar("Key", bound=Hashable)


class Heat:
    """How much each key was used of late."""

    def __init__(self, half_life_steps: int = HALF_LIFE_STEPS) -> None:
        self._growth = 2.0 ** (1.0 / half_life_steps)
        self._worth = 1.0
        self._used: list[Hashable] = []
        self._heat: dict[Hashable, float] = {}

    def of(self, key: Hashable) -> float:
        """The heat of a key, to be compared with that of another; 0 if it was never used."""
        return self._heat.get(key, 0.0)

    def use(self, keys: Iterable[Hashable]) -> None:
        """Counts one use of each key, once the step is over: in its course what was used already
        would look hotter than what comes next."""
        self._used.extend(keys)

    def next_step(self) -> None:
        """Ends a step; uses from now on count for more than those before."""
        for key in self._used:
            self._heat[key] = self._heat.get(key, 0.0) + self._worth
        self._used.clear()
        self._worth *= self._growth
        if self._worth > _LARGEST:
            self._heat = {key: heat / self._worth for key, heat in self._heat.items()}
            self._worth = 1.0


class SlotTable(Generic[Key]):
    """Which key is in which of `num_slots` slots."""

    def __init__(self, num_slots: int, heat: Heat) -> None:
        self._heat = heat
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[Key, int] = {}
        self.num_slots = num_slots

    def slot_of(self, key: Key) -> int:
        """The slot of a key, -1 for one that is not here."""
        return self._slots.get(key, -1)

    def absent(self, keys: Iterable[Key]) -> list[Key]:
        """The keys that are not here, in their order."""
        return [key for key in keys if key not in self._slots]

    def place(
        self,
        keys: Sequence[Key],
        *,
        locked: Collection[Key] = (),
        wanted: Collection[Key] = (),
    ) -> list[int]:
        """Gives each of some absent keys a slot: free ones first, then those of the coldest keys.
        Of equally cold ones the newest goes: what is needed in turns would drive itself out.

        Keys `locked` keep theirs, those `wanted` lose it only after all others. Asserts that there
        are slots enough.
        """
        short = len(keys) - len(self._free)
        if short > 0:
            for victim in self._victims(short, locked, wanted):
                self._free.append(self._slots.pop(victim))
        taken = [self._free.pop() for _ in keys]
        self._slots.update(zip(keys, taken, strict=True))
        return taken

    def admit(self, key: Key, *, locked: Collection[Key] = ()) -> int:
        """Gives a key a slot if one is free or a key that is not locked is colder, else -1."""
        if key in self._slots or not self.num_slots:
            return self.slot_of(key)
        if not self._free:
            others = (other for other in self._slots if other not in locked)
            coldest = min(others, key=self._heat.of, default=None)
            if coldest is None or self._heat.of(coldest) >= self._heat.of(key):
                return -1
        return self.place([key], locked=locked)[0]

    def check_integrity(self) -> None:
        """Recounts the slots; for tests and idle moments."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots))

    def _victims(self, count: int, locked: Collection[Key], wanted: Collection[Key]) -> list[Key]:
        candidates = [key for key in reversed(self._slots) if key not in locked]
        assert len(candidates) >= count, "more experts at once than there are slots"
        candidates.sort(key=lambda key: (key in wanted, self._heat.of(key)))
        return candidates[:count]
