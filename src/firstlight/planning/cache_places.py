"""Owns where the cache of a rank lies: on the device, in host memory, on disk; and what of a long
sequence lies where.

Every size comes from the functions the engine sizes its own caches by; knows no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import blocks_for
from firstlight.planning.caches import CacheNeed, most_device_blocks
from firstlight.planning.tier_sizing import (
    far_pages,
    least_blocks,
    plan_tiers,
    tier_bytes,
    tier_device_bytes,
    unit_bytes_of,
)
from firstlight.settings.tiers import TierSettings
from firstlight.sharding.tier_pieces import most_staging_bytes

NOWHERE = FarSizes(0, 0)


@dataclass(frozen=True)
class CachePlaces:
    """Blocks of `block_size` tokens that a rank has on its device, the null one left out, and pages
    of each paged group outside it. `far_bytes` are those of the tiers, slots of recurrent state
    included; `tiers_bytes` what tiers take on the device beside its caches, `host_bytes` what they
    take of the host's memory at most.
    """

    block_size: int
    device_blocks: int
    far_pages: FarSizes = NOWHERE
    far_bytes: FarSizes = NOWHERE
    tiers_bytes: int = 0
    host_bytes: int = 0

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of one sequence, or of several, that each place holds."""
        pages = {"device": self.device_blocks, **self.far_pages._asdict()}
        return {place: number * self.block_size for place, number in pages.items()}

    def at_once(self, context: int) -> int:
        """Sequences of full length that the device holds at once; one where it takes a tier too."""
        return max(1, self.device_blocks // blocks_for(context, self.block_size))

    def beyond(self, context: int) -> FarSizes:
        """Pages of one sequence that lie in host memory and on disk when it has become `context`
        tokens long: no more than have to, host memory first.
        """
        pages = max(0, blocks_for(context, self.block_size) - self.device_blocks)
        host = min(pages, self.far_pages.host)
        return FarSizes(host, pages - host)


def plan_places(need: CacheNeed, tiers: TierSettings, *, available: int) -> CachePlaces:
    """Returns where the caches of a rank lie, whose device has `available` bytes left for them.

    Without tiers the device has to hold every sequence at full length. With them it has to hold as
    much as one sequence needs there, and gets as much of the rest as there is room for. Raises
    OutOfBudget for a tier that cannot hold a page of each group.
    """
    if not tiers.host_bytes and not tiers.disk_bytes:
        return CachePlaces(need.block_size, need.all_blocks)
    units = unit_bytes_of(need.states, need.cut)
    sizes = plan_tiers(need.states, units, tiers)
    beside = tier_device_bytes(need.states, sizes, need.cut)
    pages = far_pages(need.states, sizes)
    least = least_blocks(
        need.context, need.block_size, chunk_tokens=need.chunk_tokens, far_pages=sum(pages)
    )
    return CachePlaces(
        block_size=need.block_size,
        device_blocks=most_device_blocks(need, available - beside, least=least),
        far_pages=pages,
        far_bytes=tier_bytes(sizes, units),
        tiers_bytes=beside,
        host_bytes=tiers.host_bytes + (most_staging_bytes(units) if tiers.disk_bytes else 0),
    )
