"""Owns how many tokens of requests that started could have been reused, by cache group.

Knows no request; a group is asked, and nothing is taken.
"""

from collections.abc import Sequence

from firstlight.cache.cache_group import CacheGroup
from firstlight.cache.prefix_index import PrefixChain


class FoundTokens:
    """Since the start: `asked` tokens could have been reused at most, and of these each group alone
    had `found`.
    """

    def __init__(self, num_groups: int) -> None:
        self.asked = 0
        self.found = [0] * num_groups

    def count(self, groups: Sequence[CacheGroup], chain: PrefixChain, most: int) -> None:
        """Counts a request that starts, of which at most so many tokens can be reused."""
        self.asked += most
        for index, group in enumerate(groups):
            self.found[index] += group.reusable_tokens(chain, most)
