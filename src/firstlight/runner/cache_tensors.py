"""Owns the tensors behind the cache groups of a rank; which page or slot holds what is the
manager's matter.

Shape letters: P pages, K KV heads, S tokens of a page, H head width, W latent width; R slots, then
heads, key and value width of a recurrent matrix; T kept inputs of C convolution channels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.cache.manager import distinct_specs
from firstlight.errors import ConfigError
from firstlight.layers.layer_state import (
    LayerState,
    PagedKeysValues,
    PagedLatents,
    RecurrentSlots,
)
from firstlight.schedule.step import StateCopy
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    StateSpec,
)


@dataclass(frozen=True)
class CacheShape:
    """How caches are cut: pages per paged group, tokens per page, tensor parallel degree, element
    type, device, and slots per recurrent group.
    """

    num_blocks: int
    block_size: int
    tp: int
    dtype: torch.dtype
    device: torch.device
    num_slots: int = 0


def planned_cache_bytes(states: Sequence[StateSpec], shape: CacheShape) -> int:
    """Returns the bytes all caches of a rank take."""
    size = shape.dtype.itemsize
    per_token = sum(s.token_bytes(shape.tp, size) for s in states)
    per_slot = sum(s.sequence_bytes(shape.tp, size) for s in states)
    return per_token * shape.block_size * shape.num_blocks + per_slot * shape.num_slots


def allocate_states(states: Sequence[StateSpec], shape: CacheShape) -> tuple[LayerState, ...]:
    """Returns the state of every layer, values undefined: no kernel reads a slot that was not
    written, and memory that is never used is never touched (zeroing 4 GiB takes seconds).

    Raises ConfigError for a kind of state this version cannot hold.
    """
    groups = distinct_specs(states)
    return tuple(_allocate(state, groups.index(state), shape) for state in states)


def state_bytes(states: Sequence[LayerState]) -> int:
    """Returns the bytes really allocated for layer states."""
    return sum(t.untyped_storage().nbytes() for state in states for t in _tensors(state))


def copy_slots(states: Sequence[LayerState], copies: Sequence[StateCopy]) -> None:
    """Carries out copies of recurrent slots in every layer of their groups.

    All sources of a layer are read before a target is written, so a slot may be both. Takes memory
    for the copied slots of one layer.
    """
    for group in {copy.group for copy in copies}:
        layers = [s for s in states if isinstance(s, RecurrentSlots) and s.group == group]
        device = layers[0].matrices_RHKV.device
        chosen = [copy for copy in copies if copy.group == group]
        sources = torch.tensor([copy.source for copy in chosen], device=device)
        targets = torch.tensor([copy.target for copy in chosen], device=device)
        for tensor in (t for layer in layers for t in _tensors(layer)):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _allocate(state: StateSpec, group: int, shape: CacheShape) -> LayerState:
    pages, size = shape.num_blocks, shape.block_size
    if isinstance(state, GroupedQueryState):
        cut = (pages, state.local_heads(shape.tp), size, state.head_dim)
        return PagedKeysValues(_empty(cut, shape), _empty(cut, shape), group)
    if isinstance(state, LatentState):
        return PagedLatents(_empty((pages, size, state.width), shape), group)
    if isinstance(state, RecurrentState):
        matrix = (state.heads // shape.tp, state.key_dim, state.value_dim)
        matrices = _empty((shape.num_slots, *matrix), shape, torch.float32)
        channels = state.conv_channels // shape.tp
        inputs = _empty((shape.num_slots, state.conv_taps, channels), shape)
        return RecurrentSlots(matrices, inputs, group)
    raise ConfigError(f"no cache for {state.kind} state in this version")


def _empty(size: tuple[int, ...], shape: CacheShape, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(size, dtype=dtype or shape.dtype, device=shape.device)


def _tensors(state: LayerState) -> Iterator[Tensor]:
    return (value for value in vars(state).values() if isinstance(value, Tensor))
