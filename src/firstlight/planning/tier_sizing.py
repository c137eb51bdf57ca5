"""Owns how many pages and slots lie outside the device, and how many pages must lie on it.

Pure arithmetic over sizes in bytes, which engine and planner share; knows neither of them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from firstlight.cache.cache_group import RECURRENT
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.cache.paged_group import window_of
from firstlight.errors import OutOfBudget
from firstlight.settings.tiers import TierSettings
from firstlight.sharding.attention_pattern import CHOSEN_TOKENS, SEGMENT_TOKENS
from firstlight.sharding.state_spec import StateSpec, cached_page_bytes, page_summary_bytes
from firstlight.units import format_bytes

# Recurrent state takes at most this part of a tier beside pages, and one slot of each group at
# least.
SLOT_SHARE = 0.25


class UnitCut(NamedTuple):
    """How caches are cut: tokens of a block, tensor parallel degree, bytes of a value in the
    compute type, and the type of caches as `serve --kv-dtype` has it.
    """

    block_size: int
    tp: int
    element_bytes: int
    kv_dtype: str = "auto"

    def unit_bytes(self, state: StateSpec) -> int:
        """Bytes on one rank of one layer's block or slot."""
        size = self.element_bytes
        page = cached_page_bytes(state, self.tp, size, self.kv_dtype, self.block_size)
        return page + state.sequence_bytes(self.tp, size)


def unit_bytes_of(states: Sequence[StateSpec], cut: UnitCut) -> tuple[int, ...]:
    """Returns the bytes on one rank of a block or slot of each cache group, of all its layers."""
    counts = Counter(states)
    return tuple(counts[state] * cut.unit_bytes(state) for state in distinct_specs(states))


def tier_device_bytes(states: Sequence[StateSpec], sizes: Sequence[FarSizes], cut: UnitCut) -> int:
    """Returns what tiers take on the device itself: summaries of pages that lie outside it, and the
    buffers that each group of pages is read through there.

    Layers of a group share the buffers; pages that a window sees are never read so.
    """
    found, counts = 0, Counter(states)
    for state, size in zip(distinct_specs(states), sizes, strict=True) if sizes else ():
        if state.kind == RECURRENT or window_of(state) is not None:
            continue
        summary = page_summary_bytes(state, cut.tp)
        tokens = CHOSEN_TOKENS if summary else 2 * SEGMENT_TOKENS
        pages = blocks_for(tokens, cut.block_size)
        found += sum(size) * counts[state] * summary
        found += pages * (cut.unit_bytes(state) - summary)
    return found


def far_pages(states: Sequence[StateSpec], sizes: Sequence[FarSizes]) -> FarSizes:
    """Returns the pages of a sequence that may lie in host memory and on disk, the same in each
    group; `sizes` are those of plan_tiers.
    """
    kinds = [spec.kind for spec in distinct_specs(states)]
    pairs = zip(sizes, kinds, strict=True) if sizes else ()
    return next((size for size, kind in pairs if kind != RECURRENT), FarSizes(0, 0))


def least_blocks(context: int, block_size: int, *, chunk_tokens: int | None, far_pages: int) -> int:
    """Returns the blocks on the device without which a sequence of `context` tokens could not be
    computed: all, or what is left beside `far_pages`, but two steps' worth.
    """
    whole = blocks_for(context, block_size)
    working = 2 * blocks_for(chunk_tokens or context, block_size) + 2
    return min(whole, max(whole - far_pages, working))


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
    num_pages = (budget - num_slots * slot) // page if page else 0
    if page and num_pages < 1:
        raise OutOfBudget(
            f"tiers: {name} holds {format_bytes(budget)} on each rank; a page of every cache group "
            f"and a slot of recurrent state take {format_bytes(page + slot)}. Raise {name}, or "
            "leave it out"
        )
    return tuple(num_slots if kind == RECURRENT else num_pages for kind in kinds)
