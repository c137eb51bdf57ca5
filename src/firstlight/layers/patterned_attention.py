"""Owns which way a call of attention over pages takes: everything, a window, or chosen blocks.

Knows no projection and no cache policy.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from firstlight.layers.layer_state import PagedState
from firstlight.layers.paged_attention import (
    PagedCall,
    PagedKernels,
    Sight,
    attend_anywhere,
    attend_whole,
)
from firstlight.layers.sparse_attention import attend_sparse
from firstlight.sharding.attention_pattern import AttentionPattern


def is_patterned(pattern: AttentionPattern, state: PagedState) -> bool:
    """Whether a layer leaves tokens out, or may find pages far away."""
    return not pattern.is_full or state.far is not None


def attend_pattern(
    call: PagedCall,
    state: PagedState,
    kernels: PagedKernels,
    pattern: AttentionPattern,
    window: int | None = None,
) -> Tensor:
    """Writes the new rows and attends as the pattern says, wherever pages lie; returns [T, N, V].

    `window` is that of the model itself. Pages that a window sees are never far.
    """
    if pattern.is_sparse:
        return attend_sparse(call, state, kernels, pattern)
    window = pattern.window if pattern.window is not None else window
    if window is not None:
        return attend_whole(call, state, kernels, Sight(window, pattern.sinks))
    return attend_anywhere(call, state, kernels)


def set_patterns(module: Any, patterns: Sequence[AttentionPattern]) -> None:
    """Tells the attention of every layer of a model what to read where it has a cache."""
    for layer, pattern in zip(module.layers, patterns, strict=False):
        attention: Any = getattr(layer, "attention", None)  # another stage's layer has none
        if isinstance(getattr(attention, "pattern", None), AttentionPattern):
            attention.pattern = pattern
