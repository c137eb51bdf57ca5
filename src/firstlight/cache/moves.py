"""Owns what ranks have to be told before the next step: content that moves, blocks renumbered.

Knows no policy; groups, tiers and allocators write, the scheduler takes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class UnitMove(NamedTuple):
    """The content of unit `source` of a cache group is to be copied to unit `target`."""

    group: int
    source: int
    target: int


@dataclass
class Moves:
    """`copies` are to be made in this order. `renumbered` are blocks of running requests that got
    another number: by request, (cache group, place in its table) and the new one.
    """

    copies: list[UnitMove] = field(default_factory=list)
    renumbered: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)

    def take_copies(self) -> list[UnitMove]:
        """The copies since the last call."""
        taken = list(self.copies)
        self.copies.clear()
        return taken

    def renumber(self, request_id: str, group: int, place: int, block: int) -> None:
        """Notes the new number of a block; what was noted before of this place is forgotten."""
        self.renumbered.setdefault(request_id, {})[group, place] = block

    def take_renumbered(self, request_id: str) -> list[tuple[int, int, int]]:
        """What ranks do not know yet of a request's blocks: (group, place, new number)."""
        taken = self.renumbered.pop(request_id, {})
        return [(group, place, block) for (group, place), block in taken.items()]
