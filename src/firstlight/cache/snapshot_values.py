"""Owns which snapshot of recurrent state is given up first: the one worth least for its bytes.

Knows no request and no tensor. Snapshots of one group cost the same bytes, so their order by value
is their order by value per byte.
"""

from collections.abc import Callable
from dataclasses import dataclass

from firstlight.cache.prefix_index import PrefixKey

# However often a snapshot was used, this many idle evictions of equal length outlive it.
MOST_USES = 16


@dataclass
class Kept:
    """A snapshot of `num_blocks` blocks of tokens. `fresh` until somebody resumed from it."""

    key: PrefixKey
    num_blocks: int
    uses: int
    value: int = 0
    used_at: int = 0
    fresh: bool = True


class SnapshotValues:
    """What each snapshot saves: its length times its uses, on top of a floor that rises.

    The floor is the value of the newest victim, so what is not used any more is overtaken by what
    is (GreedyDual-Size-Frequency, Cherkasova, HP Labs 1998). A snapshot whose pages are gone can
    save nothing and goes before all others; of equal values the one unused longest goes.
    """

    def __init__(self, holds_pages: Callable[[PrefixKey], bool]) -> None:
        self._holds_pages = holds_pages
        self._kept: dict[int, Kept] = {}
        self._floor = 0
        self._moment = 0

    @property
    def slots(self) -> set[int]:
        """The slots that hold a snapshot."""
        return set(self._kept)

    @property
    def lengths(self) -> set[int]:
        """The lengths in blocks of which there are snapshots."""
        return {kept.num_blocks for kept in self._kept.values()}

    def enter(self, slot: int, key: PrefixKey, *, num_blocks: int, uses: int) -> None:
        """Notes a snapshot that is expected to be used so often."""
        self._kept[slot] = Kept(key, num_blocks, uses)
        self._rate(slot)

    def use(self, slot: int) -> None:
        """Notes that a request resumed from the snapshot."""
        kept = self._kept[slot]
        kept.uses, kept.fresh = min(MOST_USES, kept.uses + 1), False
        self._rate(slot)

    def remove(self, slot: int) -> None:
        """Forgets a snapshot, if there is one."""
        self._kept.pop(slot, None)

    def length(self, slot: int) -> int:
        """The blocks of tokens behind which the state of a slot is."""
        return self._kept[slot].num_blocks

    def is_fresh(self, slot: int) -> bool:
        """Whether nobody has resumed from the snapshot."""
        return self._kept[slot].fresh

    def choose_victim(self, *, spare: int | None = None) -> int:
        """The slot to be given up, another than `spare` if there is one. Raises the floor."""
        slots = [slot for slot in self._kept if slot != spare] or list(self._kept)
        victim = min(slots, key=self._rank)
        self._floor = max(self._floor, self._kept[victim].value)
        return victim

    def _rate(self, slot: int) -> None:
        kept = self._kept[slot]
        self._moment += 1
        kept.value, kept.used_at = self._floor + kept.num_blocks * kept.uses, self._moment

    def _rank(self, slot: int) -> tuple[bool, int, int]:
        kept = self._kept[slot]
        return self._holds_pages(kept.key), kept.value, kept.used_at
