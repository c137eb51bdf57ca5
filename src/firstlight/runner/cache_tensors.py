"""Owns the tensors behind the cache groups of a rank; which page holds what is the manager's
matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from firstlight.cache.manager import distinct_specs
from firstlight.errors import ConfigError
from firstlight.layers.layer_state import LayerState, PagedKeysValues
from firstlight.sharding.state_spec import GroupedQueryState, StateSpec


@dataclass(frozen=True)
class CacheShape:
    """How caches are cut: pages per group, tokens per page, tensor parallel degree, element
    type.
    """

    num_blocks: int
    block_size: int
    tp: int
    dtype: torch.dtype
    device: torch.device


def planned_cache_bytes(states: Sequence[StateSpec], shape: CacheShape) -> int:
    """Returns the bytes all caches of a rank take."""
    per_token = sum(s.token_bytes(shape.tp, shape.dtype.itemsize) for s in states)
    return per_token * shape.block_size * shape.num_blocks


def allocate_states(states: Sequence[StateSpec], shape: CacheShape) -> tuple[LayerState, ...]:
    """Returns the state of every layer, values undefined: no kernel reads a slot that was not
    written, and memory that is never used is never touched (zeroing 4 GiB takes seconds).

    Raises ConfigError for a kind of state this version cannot hold.
    """
    groups = distinct_specs(states)
    return tuple(_allocate(state, groups.index(state), shape) for state in states)


def state_bytes(states: Sequence[LayerState]) -> int:
    """Returns the bytes really allocated for layer states."""
    tensors = [t for s in states for t in (s.keys_PKSH, s.values_PKSH)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _allocate(state: StateSpec, group: int, shape: CacheShape) -> LayerState:
    if not isinstance(state, GroupedQueryState):
        raise ConfigError(f"no cache for {state.kind} state in this version")
    size = (shape.num_blocks, state.local_heads(shape.tp), shape.block_size, state.head_dim)
    keys = torch.empty(size, dtype=shape.dtype, device=shape.device)
    values = torch.empty(size, dtype=shape.dtype, device=shape.device)
    return PagedKeysValues(keys, values, group)
