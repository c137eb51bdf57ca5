"""Owns how much of a long prefix a request starts with on the device, and how much stays beyond it.

    found blocks   0 ............ lead | lead ............ num_shared
    read from      where they lie      | the device

Only a prefix that leaves no block to write on is read beyond the device, as far as half of it.
"""

from typing import NamedTuple

from firstlight.cache.far_pool import FarPool
from firstlight.cache.prefix_index import PrefixChain, PrefixIndex


def most_shared(num_usable: int) -> int:
    """Found blocks that a request may start with on a device of so many."""
    return max(1, num_usable - 1)


def num_spared(num_usable: int) -> int:
    """Blocks that a request longer than a device of so many leaves to others that wait."""
    return num_usable // 4


class FoundBlocks(NamedTuple):
    """Where blocks of a group can be found: on the device, one of `num_usable`, and beyond it."""

    near: PrefixIndex
    far: FarPool | None
    num_usable: int

    def lead(self, chain: PrefixChain, num_shared: int) -> int:
        """How many of the oldest found blocks stay beyond the device, when all would fill it.

        Some of them may have to go there first; there is room for these.
        """
        if self.far is None or num_shared <= most_shared(self.num_usable):
            return 0
        lead, wanted, room = 0, num_shared - self.num_usable // 2, self.far.num_free
        while lead < wanted:
            key = chain.key(lead)
            is_far = self.far.find(key) is not None
            if not is_far and (self.near.find(key) is None or lead >= room):
                break
            lead += 1
        return lead

    def usable_length(self, chain: PrefixChain, found: int) -> int:
        """How many found blocks a request can be started with beside room to go on."""
        if self.far is None:
            return found
        return min(found, self.lead(chain, found) + most_shared(self.num_usable))

    def hold_lead(self, chain: PrefixChain, num_shared: int) -> list[int]:
        """Holds the units of those blocks, and copies out what is on the device alone."""
        far, lead = self.far, range(self.lead(chain, num_shared))
        if far is None:
            return []
        found = {i: far.find(chain.key(i)) for i in lead}
        held = {i: far.hold(unit) for i, unit in found.items() if unit is not None}
        for index in lead:
            if index not in held:
                block = self.near.find(chain.key(index))
                unit = None if block is None else far.take_over(chain.key(index), block)
                assert unit is not None, "a block is claimed that lookup did not report"
                held[index] = unit
        return [held[index] for index in lead]
