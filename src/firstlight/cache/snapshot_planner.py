"""Owns at which points of requests recurrent state is copied, given what can be found already.

Knows no tensor and no policy of scheduling; the groups say what they have and where it goes.
"""

from collections.abc import Mapping

from firstlight.cache.cache_group import SlotCopy
from firstlight.cache.cache_options import CacheOptions, Holding
from firstlight.cache.cacheable_request import CacheableRequest
from firstlight.cache.paged_group import PagedGroup
from firstlight.cache.prefix_index import PrefixChain
from firstlight.cache.recurrent_group import RecurrentGroup, Wish
from firstlight.cache.snapshot_points import SnapshotPoint, SnapshotPoints, make_points

# Uses expected of the snapshots of a request that says it has a cache key.
HINTED_USES = 3


class SnapshotPlanner:
    """Snapshots of running requests; `holdings` are the manager's."""

    def __init__(
        self,
        paged: Mapping[int, PagedGroup],
        recurrent: Mapping[int, RecurrentGroup],
        holdings: Mapping[str, Holding],
        *,
        block_size: int,
        options: CacheOptions,
    ) -> None:
        self._paged, self._recurrent, self._holdings = paged, recurrent, holdings
        self._block_size = block_size
        self._turn_tokens = options.turn_tokens

    def next_point(self, request: CacheableRequest, chain: PrefixChain) -> SnapshotPoint | None:
        """The first point ahead whose state some group lacks and has a slot for."""
        if not self._recurrent:
            return None
        holding = self._holdings.get(request.request_id)
        points = None if holding is None else holding.points
        if points is None:
            points = self.points(request, chain)
        num_needed = 1 + (holding is None)
        for point in points.ahead(request.num_computed, len(request.token_ids)):
            num_blocks = point.num_tokens // self._block_size
            for group in self._recurrent.values():
                if group.num_free >= num_needed and not group.has_snapshot(chain, num_blocks):
                    return point
        return None

    def save(
        self, request: CacheableRequest, chain: PrefixChain, num_tokens: int
    ) -> list[SlotCopy]:
        """Prepares snapshots if a step that ends behind so many tokens ends at a point."""
        point = self.next_point(request, chain)
        if point is None or point.num_tokens != num_tokens:
            return []
        points = self._holdings[request.request_id].points
        if point.is_turn and points is not None:
            points.last_turn = num_tokens
        wish = Wish(point.is_turn, HINTED_USES if request.expects_reuse else 1)
        num_blocks = num_tokens // self._block_size
        groups = self._recurrent.values()
        copies = [group.save(request.request_id, chain, num_blocks, wish) for group in groups]
        return [copy for copy in copies if copy is not None]

    def points(self, request: CacheableRequest, chain: PrefixChain) -> SnapshotPoints:
        """Where the state of a request that starts behind its computed tokens is to be kept."""
        branch = min(len(request.token_ids) - 1, request.most_reused)
        for group in self._paged.values():
            branch = group.reusable_tokens(chain, branch)
        return make_points(
            request.num_prompt,
            block_size=self._block_size,
            branch=branch,
            turn_tokens=1 if request.expects_reuse else self._turn_tokens,
            num_cached=request.num_computed,
        )
