"""Owns what the caches of one rank take, as the engine's allocator rounds them, and of how many
blocks they are.

Knows no model but the states of its layers, and nothing of what else lies on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from firstlight.cache.cache_group import RECURRENT
from firstlight.cache.manager import blocks_for
from firstlight.cache.paged_group import group_blocks, most_blocks_held, sink_blocks, window_of
from firstlight.sharding.state_spec import StateSpec, cached_token_bytes


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


def cache_bytes(need: CacheNeed) -> dict[str, int]:
    """Returns the bytes of a rank's caches, by kind of state, as the engine rounds them.

    Every sequence has blocks for its full context, the null block and the null slot are extra, and
    recurrent state has room for one snapshot a sequence. `context_parallel` ranks share out the
    blocks. Groups with a window have the blocks that sequences can hold at once.
    """
    per_sequence = blocks_for(need.context, need.block_size)
    blocks = -(-need.sequences * per_sequence // need.context_parallel) + 1
    slots = 2 * need.sequences + 1
    windows = window_blocks(
        need.states, blocks, need.sequences, chunk_tokens=need.chunk_tokens, block=need.block_size
    )
    held = HeldCaches(blocks, need.block_size, slots, windows, need.kv_dtype)
    return held_cache_bytes(need.states, held, tp=need.tp, element_bytes=need.element_bytes)


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
        token = cached_token_bytes(state, tp, element_bytes, held.kv_dtype)
        paged = token * held.block_size * blocks
        slots = state.sequence_bytes(tp, element_bytes) * held.num_slots
        sizes[state.kind] += layers * (paged + slots)
    return {kind: size for kind, size in sizes.items() if size}


def recurrent_bytes(states: Sequence[StateSpec], tp: int, element_bytes: int) -> int:
    """Returns the bytes of one sequence's recurrent state on one rank."""
    return sum(s.sequence_bytes(tp, element_bytes) for s in states if s.kind == RECURRENT)
