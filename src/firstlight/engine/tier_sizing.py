"""Owns how many pages and slots lie outside the device; pure arithmetic over sizes in bytes."""

from collections.abc import Sequence

from firstlight.cache.cache_group import RECURRENT
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import distinct_specs
from firstlight.errors import OutOfBudget
from firstlight.settings.tiers import TierSettings
from firstlight.sharding.state_spec import StateSpec
from firstlight.units import format_bytes

# Recurrent state takes at most this part of a tier beside pages, and one slot of each group at
# least.
SLOT_SHARE = 0.25


def plan_tiers(
    states: Sequence[StateSpec], unit_bytes: Sequence[int], tiers: TierSettings
) -> tuple[FarSizes, ...]:
    """Returns the units of each cache group, of `unit_bytes` each, in host memory and on disk; none
    without tiers.

    Every paged group gets as many pages as the others. Raises OutOfBudget for a tier that cannot
    hold a page of each group.
    """
    if not tiers.host_bytes and not tiers.disk_bytes:
        return ()
    kinds = [spec.kind for spec in distinct_specs(states)]
    host = _split("host", tiers.host_bytes, kinds, unit_bytes)
    disk = _split("disk", tiers.disk_bytes, kinds, unit_bytes)
    return tuple(FarSizes(*pair) for pair in zip(host, disk, strict=True))


def tier_bytes(sizes: Sequence[FarSizes], unit_bytes: Sequence[int]) -> FarSizes:
    """Returns the bytes of a rank in host memory and on disk."""
    pairs = list(zip(sizes, unit_bytes, strict=True)) if sizes else []
    return FarSizes(*(sum(size[place] * each for size, each in pairs) for place in (0, 1)))


def _split(
    name: str, budget: int, kinds: Sequence[str], unit_bytes: Sequence[int]
) -> tuple[int, ...]:
    if not budget:
        return (0,) * len(kinds)
    pairs = list(zip(kinds, unit_bytes, strict=True))
    slot = sum(size for kind, size in pairs if kind == RECURRENT)
    page = sum(size for kind, size in pairs if kind != RECURRENT)
    num_slots = max(1, int(budget * SLOT_SHARE) // slot) if slot else 0
    num_pages = (budget - num_slots * slot) // page
    if num_pages < 1:
        raise OutOfBudget(
            f"tiers: {name} holds {format_bytes(budget)} on each rank; a page of every cache group "
            f"and a slot of recurrent state take {format_bytes(page + slot)}. Raise {name}, or "
            "leave it out"
        )
    return tuple(num_slots if kind == RECURRENT else num_pages for kind in kinds)
