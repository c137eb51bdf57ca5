"""Owns what the caches of one rank take, as the engine's allocator rounds them, and of how many
blocks they are.

Knows no model but the states of its layers, and nothing of what else lies on a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from firstlight.cache.cache_group import RECURRENT
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.cache.paged_group import group_blocks, most_blocks_held, sink_blocks, window_of
from firstlight.planning.tier_sizing import UnitCut, unit_bytes_of
from firstlight.sharding.state_spec import StateSpec, cached_page_bytes


@dataclass(frozen=True)
class CacheNeed:
    """What the caches of one rank must hold; `chunk_tokens` of a sequence are computed at once
    (None: any number).
    """

    states: Sequence[StateSpec]
    tp: int
    element_bytes: int
    block_size: int
    sequences: int
    context: int
    context_parallel: int = 1
    chunk_tokens: int | None = None
    kv_dtype: str = "auto"

    @property
    def cut(self) -> UnitCut:
        """How blocks are cut."""
        return UnitCut(self.block_size, self.tp, self.element_bytes, self.kv_dtype)

    @property
    def all_blocks(self) -> int:
        """Blocks of a group without a window that hold every sequence at its full length."""
        per_sequence = blocks_for(self.context, self.block_size)
        return -(-self.sequences * per_sequence // self.context_parallel)


def cache_bytes(need: CacheNeed, num_blocks: int | None = None) -> dict[str, int]:
    """Returns the bytes of a rank's caches, by kind of state, as the engine rounds them.

    There are `num_blocks` blocks (None: for every sequence's full context), the null block and the
    null slot are extra, and recurrent state has room for one snapshot a sequence.
    `context_parallel` ranks share out the blocks. Groups with a window have the blocks that
    sequences can hold at once.
    """
    blocks = (need.all_blocks if num_blocks is None else num_blocks) + 1
    held = HeldCaches(
        blocks,
        need.block_size,
        2 * need.sequences + 1,
        _windows(need, need.states, blocks),
        need.kv_dtype,
    )
    return held_cache_bytes(need.states, held, tp=need.tp, element_bytes=need.element_bytes)


def most_device_blocks(need: CacheNeed, limit: int, *, least: int) -> int:
    """Returns the most blocks, of those all sequences need, whose caches do not exceed `limit`
    bytes; `least` if even they do.
    """
    groups, units = distinct_specs(need.states), unit_bytes_of(need.states, need.cut)
    slots = 2 * need.sequences + 1

    def taken(num_blocks: int) -> int:
        windows = _windows(need, groups, num_blocks + 1)
        return sum(
            size * (slots if g.kind == RECURRENT else group_blocks(g, num_blocks + 1, windows))
            for g, size in zip(groups, units, strict=True)
        )

    more = range(least + 1, need.all_blocks + 1)
    return least + bisect_right(more, limit, key=taken)


def sequence_bytes(need: CacheNeed) -> dict[str, int]:
    """Returns the bytes that one sequence of full length holds at most, by kind of state, on one
    rank: its blocks, those of a window as they are given back behind it, and its slot.
    """
    blocks = blocks_for(need.context, need.block_size)
    alone = replace(need, sequences=1)
    windows = {w: held - 1 for w, held in _windows(alone, need.states, blocks + 1).items()}
    held = HeldCaches(blocks, need.block_size, 1, windows, need.kv_dtype)
    return held_cache_bytes(need.states, held, tp=need.tp, element_bytes=need.element_bytes)


def _windows(need: CacheNeed, states: Sequence[StateSpec], num_blocks: int) -> dict[int, int]:
    return window_blocks(
        states,
        num_blocks,
        need.sequences,
        chunk_tokens=need.chunk_tokens,
        block=need.block_size,
    )


def window_blocks(
    states: Sequence[StateSpec],
    num_blocks: int,
    sequences: int,
    *,
    chunk_tokens: int | None,
    block: int,
) -> dict[int, int]:
    """Returns the blocks of groups by their window, of `block` tokens, when others have
    `num_blocks`: all that sequences can hold at once, where that is less.
    """
    if chunk_tokens is None:
        return {}
    most: dict[int, int] = {}
    for state in states:
        if (window := window_of(state)) is not None:
            held = most_blocks_held(window, chunk_tokens, block) + sink_blocks(state, block)
            most[window] = max(held, most.get(window, 0))
    caps = {window: sequences * held + 1 for window, held in most.items()}
    return {window: cap for window, cap in caps.items() if cap < num_blocks}


@dataclass(frozen=True)
class HeldCaches:
    """What an engine allocates on each rank: blocks of paged groups, those with a window as
    `window_blocks` says, and slots; the null ones included. `kv_dtype` as `serve` has it.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    window_blocks: Mapping[int, int] = field(default_factory=dict)
    kv_dtype: str = "auto"


def held_cache_bytes(
    states: Sequence[StateSpec], held: HeldCaches, *, tp: int, element_bytes: int
) -> dict[str, int]:
    """Returns the bytes of a rank's caches by kind of state."""
    sizes: Counter[str] = Counter()
    for state, layers in Counter(states).items():
        blocks = group_blocks(state, held.num_blocks, held.window_blocks)
        page = cached_page_bytes(state, tp, element_bytes, held.kv_dtype, held.block_size)
        paged = page * blocks
        slots = state.sequence_bytes(tp, element_bytes) * held.num_slots
        sizes[state.kind] += layers * (paged + slots)
    return {kind: size for kind, size in sizes.items() if size}


def recurrent_bytes(states: Sequence[StateSpec], tp: int, element_bytes: int) -> int:
    """Returns the bytes of one sequence's recurrent state on one rank."""
    return sum(s.sequence_bytes(tp, element_bytes) for s in states if s.kind == RECURRENT)
