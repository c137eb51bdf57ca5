"""Owns how many cache blocks and state slots an engine takes; pure arithmetic over what ranks
reported.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from firstlight.cache.make_groups import check_specs
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.cache.paged_group import group_blocks
from firstlight.engine.settings import EngineSettings
from firstlight.errors import OutOfBudget, UsageError
from firstlight.models.spec import ModelSpec
from firstlight.planning.caches import window_blocks
from firstlight.planning.tier_sizing import (
    UnitCut,
    far_pages,
    least_blocks,
    plan_tiers,
    tier_device_bytes,
    unit_bytes_of,
)
from firstlight.settings.tiers import TierSettings, parse_tiers
from firstlight.sharding.state_spec import StateSpec, cached_page_bytes
from firstlight.sharding.tier_pieces import most_staging_bytes
from firstlight.units import format_bytes

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Kept for the framework, the driver and activations, of what is left after the weights.
RESERVED_SHARE = 0.2
# Without a budget a machine that is shared (CPU memory) is not taken whole.
DEFAULT_LIMIT = 4 * 1024**3
# Snapshots of recurrent state take at most this part of what live state leaves; blocks take the
# rest. A snapshot is worth nothing without the blocks before it.
SNAPSHOT_SHARE = 0.25


@dataclass(frozen=True)
class CacheNeeds:
    """What the cache must hold: layer states, tokens per block, sequences and their longest
    length. `chunk_tokens` of one sequence are computed in a step (None: any number), which bounds
    what layers with a window hold of it. `far_pages` of a sequence may lie outside the device, in
    each group.
    """

    states: Sequence[StateSpec]
    block_size: int
    tp: int
    element_bytes: int
    max_sequences: int
    context_length: int
    chunk_tokens: int | None = None
    kv_dtype: str = "auto"
    far_pages: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes on one rank of one slot in every recurrent group; 0 without recurrent state."""
        return sum(s.sequence_bytes(self.tp, self.element_bytes) for s in self.states)

    @property
    def live_slots(self) -> int:
        """Slots that running sequences may hold at once, the null slot included."""
        return self.max_sequences + 1 if self.slot_bytes else 0

    @property
    def cut(self) -> UnitCut:
        """How blocks are cut."""
        return UnitCut(self.block_size, self.tp, self.element_bytes, self.kv_dtype)

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes on one rank of a block or slot of each cache group, of all its layers."""
        return unit_bytes_of(self.states, self.cut)

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that one sequence of full length takes in a group without a window."""
        return blocks_for(self.context_length, self.block_size)

    @property
    def least_blocks(self) -> int:
        """Blocks on the device without which a sequence of full length could not be computed: all,
        or what is left beside `far_pages`, but two steps' worth.
        """
        return least_blocks(
            self.context_length,
            self.block_size,
            chunk_tokens=self.chunk_tokens,
            far_pages=self.far_pages,
        )

    @property
    def least_paged_bytes(self) -> int:
        """Bytes on one rank of the blocks that one sequence of full length needs on the device, and
        of the null blocks.
        """
        return self.paged_bytes(self.least_blocks + 1)

    def window_blocks(self, num_blocks: int) -> dict[int, int]:
        """Blocks of groups by their window, when others have `num_blocks`: all that sequences can
        hold at once, where that is less.
        """
        return window_blocks(
            self.states,
            num_blocks,
            self.max_sequences,
            chunk_tokens=self.chunk_tokens,
            block=self.block_size,
        )

    def paged_bytes(self, num_blocks: int) -> int:
        """Bytes on one rank of all paged groups."""
        return sum(self.paged_bytes_by_kind(num_blocks).values())

    def paged_bytes_by_kind(self, num_blocks: int) -> dict[str, int]:
        """`paged_bytes`, by the kind of state."""
        sizes: Counter[str] = Counter()
        windows = self.window_blocks(num_blocks)
        for state in self.states:
            page = cached_page_bytes(
                state, self.tp, self.element_bytes, self.kv_dtype, self.block_size
            )
            sizes[state.kind] += page * group_blocks(state, num_blocks, windows)
        return {kind: size for kind, size in sizes.items() if size}

    def most_blocks(self, limit: int, *, wanted: int) -> int:
        """The most blocks, up to `wanted`, whose bytes do not exceed the limit."""
        return bisect_right(range(1, wanted + 1), limit, key=self.paged_bytes)


def cache_needs(settings: EngineSettings, spec: ModelSpec) -> CacheNeeds:
    """Returns what the cache of an engine must hold.

    Raises UsageError when the asked context exceeds the model's, ConfigError for state that no
    cache can hold.
    """
    check_specs(distinct_specs(spec.states))
    asked = settings.context_length
    if asked is not None and asked > spec.context_length:
        raise UsageError(
            f"context {asked} exceeds the model's {spec.context_length} tokens; positions beyond "
            "it were never trained"
        )
    needs = CacheNeeds(
        spec.states,
        settings.block_size,
        settings.tp,
        ELEMENT_BYTES[settings.dtype],
        settings.max_sequences,
        asked or spec.context_length,
        settings.chunk_tokens,
        settings.kv_dtype,
    )
    far = plan_tiers(needs.states, needs.unit_bytes, parse_tiers(settings.tiers))
    return replace(needs, far_pages=sum(far_pages(needs.states, far)))


def left_for_caches(available: int, needs: CacheNeeds, tiers: TierSettings, *, owned: bool) -> int:
    """Returns what is left of a rank's memory for its caches when its tiers have theirs: what they
    take on the device, and where the device's memory is the host's (not `owned`) the host tier and
    what goes to and from the disk, too.
    """
    sizes = plan_tiers(needs.states, needs.unit_bytes, tiers)
    staging = most_staging_bytes(needs.unit_bytes) if tiers.disk_bytes else 0
    host = 0 if owned else tiers.host_bytes + staging
    return max(0, available - host - tier_device_bytes(needs.states, sizes, needs.cut))


@dataclass(frozen=True)
class CachePlan:
    """What a rank allocates: blocks per paged group (those with a window as `window_blocks` says)
    and slots per recurrent group, with block 0 and slot 0, and their bytes.
    """

    num_blocks: int
    num_slots: int
    paged_bytes: int
    slot_bytes: int
    window_blocks: dict[int, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches of a rank."""
        return self.paged_bytes + self.slot_bytes


def plan_caches(
    needs: CacheNeeds, *, available: int, budget: int | None, owned: bool = False
) -> CachePlan:
    """Returns how a budget is split: live slots first, then blocks for one sequence of full length,
    then snapshots (at most one per sequence, and SNAPSHOT_SHARE), then blocks.

    `available` is the least memory any rank has left, in bytes, already divided among ranks that
    share it; `owned` says that nobody but this engine uses it. Raises OutOfBudget, with the ways
    out in numbers, when not even one sequence fits beside the live slots or the budget grants more
    than is available.
    """
    limit = budget if budget is not None else default_budget(available, owned=owned)
    left = limit - needs.live_slots * needs.slot_bytes
    spare = left - needs.least_paged_bytes
    if spare < 0:
        raise OutOfBudget(_refusal(needs, limit))
    num_slots = needs.live_slots + _num_snapshots(needs, left=left, spare=spare)
    left = limit - num_slots * needs.slot_bytes
    wanted = needs.max_sequences * needs.blocks_per_sequence + 1
    num_blocks = needs.most_blocks(left, wanted=wanted)
    plan = CachePlan(
        num_blocks,
        num_slots,
        needs.paged_bytes(num_blocks),
        num_slots * needs.slot_bytes,
        needs.window_blocks(num_blocks),
    )
    if plan.num_bytes > available:
        raise OutOfBudget(
            f"the caches would take {format_bytes(plan.num_bytes)} on each rank, "
            f"{format_bytes(available)} are free. Lower the budget below that, or max_sequences, "
            "or the context"
        )
    return plan


def _num_snapshots(needs: CacheNeeds, *, left: int, spare: int) -> int:
    if not needs.slot_bytes:
        return 0
    share = min(spare, int(left * SNAPSHOT_SHARE))
    return min(needs.max_sequences, share // needs.slot_bytes)


def default_budget(available: int, *, owned: bool = False) -> int:
    """Returns the bytes a rank gives its caches when nobody said."""
    share = int(available * (1 - RESERVED_SHARE))
    return share if owned else min(share, DEFAULT_LIMIT)


def _refusal(needs: CacheNeeds, limit: int) -> str:
    """What does not fit, and every change that alone would make it fit."""
    live = needs.live_slots * needs.slot_bytes
    blocks = needs.least_paged_bytes
    ways = [f"raise the budget to {live + blocks} bytes ({format_bytes(live + blocks)})"]
    if needs.slot_bytes and (sequences := (limit - blocks) // needs.slot_bytes - 1) > 0:
        ways.append(f"lower max_sequences to {sequences}")
    most = needs.most_blocks(limit - live, wanted=needs.blocks_per_sequence + 1)
    if (tokens := (most - 1) * needs.block_size) > 0:
        ways.append(f"lower the context to {tokens} tokens")
    advice = f"{', '.join(ways)}, or use more ranks"
    needed = _described(needs, live, beside=live <= limit)
    return f"{needed}, the budget is {format_bytes(limit)}. {advice[0].upper()}{advice[1:]}"


def _described(needs: CacheNeeds, live: int, *, beside: bool) -> str:
    per_sequence = format_bytes(needs.paged_bytes(needs.blocks_per_sequence))
    slots = f"the recurrent state of {needs.max_sequences} sequences"
    if not beside:
        each = format_bytes(needs.slot_bytes)
        return (
            f"{slots} needs {format_bytes(live)} on each rank ({each} a sequence, and one more "
            "slot is reserved)"
        )
    others = f" beside {format_bytes(live)} for {slots}" if live else ""
    return (
        f"one sequence of {needs.context_length} tokens needs {per_sequence} of KV cache on each "
        f"rank{others}"
    )
