"""Owns how long findable units of a cache group lie unused until they are reused or given up.

Knows nothing of what the units hold.
"""

from collections.abc import Callable
from typing import NamedTuple


class IdleTotals(NamedTuple):
    """Sums since the start: units reused and evicted, and the seconds they had been idle."""

    num_reused: int = 0
    reused_seconds: float = 0.0
    num_evicted: int = 0
    evicted_seconds: float = 0.0


class IdleTimes:
    """Since when each unit is idle. `clock` gives seconds that never fall."""

    def __init__(self, num_units: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = [0.0] * num_units
        self._reused, self._reused_seconds = 0, 0.0
        self._evicted, self._evicted_seconds = 0, 0.0

    @property
    def totals(self) -> IdleTotals:
        """The sums so far."""
        return IdleTotals(self._reused, self._reused_seconds, self._evicted, self._evicted_seconds)

    def rest(self, unit: int) -> None:
        """Notes that from now on nobody uses the unit, which can be found."""
        self._since[unit] = self._clock()

    def reuse(self, unit: int) -> None:
        """Notes that an idle unit is used again."""
        self._reused += 1
        self._reused_seconds += self._clock() - self._since[unit]

    def evict(self, unit: int) -> None:
        """Notes that an idle unit is taken for something else."""
        self._evicted += 1
        self._evicted_seconds += self._clock() - self._since[unit]
