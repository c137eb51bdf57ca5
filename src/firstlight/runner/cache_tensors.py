"""Owns the tensors behind the cache groups of a rank; which page or slot holds what is the
manager's matter.

Shape letters: P pages, K KV heads, S tokens of a page, H head width, W latent width; R slots, then
heads, key and value width of a recurrent matrix; T kept inputs of C convolution channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firstlight.cache.manager import distinct_specs
from firstlight.cache.paged_group import group_blocks
from firstlight.errors import ConfigError
from firstlight.layers.layer_state import (
    LayerState,
    PagedKeysValues,
    PagedLatents,
    QuantisedKeysValues,
    QuantisedLatents,
    RecurrentSlots,
)
from firstlight.schedule.step import StateCopy
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    StateSpec,
    cached_page_bytes,
    int8_groups,
)

# How caches of a byte a value are kept.
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class CacheShape:
    """How caches are cut: pages per paged group, tokens per page, tensor parallel degree, element
    type, device, and slots per recurrent group. `window_blocks` are pages of groups by their
    window, where they are not `num_blocks`; `kv_dtype` is `auto` for the element type, or
    one of CODES.
    """

    num_blocks: int
    block_size: int
    tp: int
    dtype: torch.dtype
    device: torch.device
    num_slots: int = 0
    window_blocks: Mapping[int, int] = field(default_factory=dict)
    kv_dtype: str = "auto"

    def pages(self, state: StateSpec) -> int:
        """Pages of the group of this state."""
        return group_blocks(state, self.num_blocks, self.window_blocks)


def planned_cache_bytes(states: Sequence[StateSpec], shape: CacheShape) -> int:
    """Returns the bytes all caches of a rank take."""
    size = shape.dtype.itemsize
    per_slot = sum(s.sequence_bytes(shape.tp, size) for s in states)
    paged = sum(
        cached_page_bytes(s, shape.tp, size, shape.kv_dtype, shape.block_size) * shape.pages(s)
        for s in states
    )
    return paged + per_slot * shape.num_slots


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
    if isinstance(state, GroupedQueryState):
        return _keys_values(state, group, shape)
    if isinstance(state, LatentState):
        cut = (shape.pages(state), shape.block_size, state.width)
        summaries = _summaries(state, (cut[0], 2, state.width), shape)
        if shape.kv_dtype not in CODES:
            return PagedLatents(_empty(cut, shape), group, summaries=summaries)
        scales = (*cut[:2], int8_groups(state.width))
        return QuantisedLatents(
            _empty(cut, shape, CODES[shape.kv_dtype]),
            _empty(scales, shape, torch.float16),
            group,
            summaries=summaries,
        )
    if isinstance(state, RecurrentState):
        matrix = (state.heads // shape.tp, state.key_dim, state.value_dim)
        matrices = _empty((shape.num_slots, *matrix), shape, torch.float32)
        channels = state.conv_channels // shape.tp
        inputs = _empty((shape.num_slots, state.conv_taps, channels), shape)
        return RecurrentSlots(matrices, inputs, group)
    raise ConfigError(f"no cache for {state.kind} state in this version")


def _keys_values(
    state: GroupedQueryState, group: int, shape: CacheShape
) -> PagedKeysValues | QuantisedKeysValues:
    heads = (shape.pages(state), state.local_heads(shape.tp), shape.block_size)
    cut = (*heads, state.head_dim)
    summaries = _summaries(state, (*heads[:2], 2, state.head_dim), shape)
    if shape.kv_dtype not in CODES:
        return PagedKeysValues(_empty(cut, shape), _empty(cut, shape), group, summaries=summaries)
    keys, values = (_empty(cut, shape, CODES[shape.kv_dtype]) for _ in range(2))
    key_scales, value_scales = (_empty(heads, shape, torch.float16) for _ in range(2))
    return QuantisedKeysValues(keys, key_scales, values, value_scales, group, summaries=summaries)


def _summaries(
    state: GroupedQueryState | LatentState, size: tuple[int, ...], shape: CacheShape
) -> Tensor | None:
    """Bounds of the keys of pages, where a layer chooses by them."""
    return _empty(size, shape, torch.float16) if state.summary_tokens else None


def _empty(size: tuple[int, ...], shape: CacheShape, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(size, dtype=dtype or shape.dtype, device=shape.device)


def _tensors(state: LayerState) -> Iterator[Tensor]:
    return (value for value in vars(state).values() if isinstance(value, Tensor))
