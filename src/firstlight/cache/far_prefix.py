"""Owns how much of a long prefix a request starts with on the device, and how much stays beyond it.

found blocks   0 ............ lead | lead ............ num_shared
read from      where they lie      | the device, at most 3/4 of it
"""

from firstlight.cache.far_pool import FarPool
from firstlight.cache.prefix_index import PrefixChain


def most_shared(num_usable: int) -> int:
    """Found blocks that a request may start with on a device of so many."""
    return max(1, num_usable * 3 // 4)


def leading(far: FarPool | None, chain: PrefixChain, num_shared: int, num_usable: int) -> int:
    """How many of the oldest found blocks stay beyond the device, when all would fill it."""
    if far is None or num_shared <= most_shared(num_usable):
        return 0
    lead, wanted = 0, num_shared - num_usable // 2
    while lead < wanted and far.find(chain.key(lead)) is not None:
        lead += 1
    return lead


def usable_length(far: FarPool | None, chain: PrefixChain, found: int, num_usable: int) -> int:
    """How many found blocks a request can be started with beside room to go on."""
    if far is None:
        return found
    return min(found, leading(far, chain, found, num_usable) + most_shared(num_usable))
