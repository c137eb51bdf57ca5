"""Owns modules whose weights are packed without loss; they take the place of the plain ones.

Knows no rank, no cache policy and no checkpoint; they serve only, without gradients.

Shape letters: T tokens, D model width, K input width, N output width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.kernels.packed_weight import PackedAttention, PackedMlp, PackedWeight
from firstlight.kernels.registry import KernelSet
from firstlight.layers.layer_state import PagedKeysValues
from firstlight.layers.packed_batch import PackedBatch


class PackedMatrix:
    """Stands where a module's weight tensor stood: torch's linear and embedding accept it.

    Anything else that torch is asked to do with it is a TypeError.
    """

    def __init__(self, packed: PackedWeight, kernels: KernelSet) -> None:
        self.packed = packed
        self.kernels = kernels
        self.shape = torch.Size((packed.rows, packed.columns))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(args) >= 2 and isinstance(args[1], PackedMatrix):
            packed, kernels = args[1].packed, args[1].kernels
            if function is nn.functional.linear:
                return kernels.packed_linear(args[0], packed, *args[2:], **(kwargs or {}))
            if function is nn.functional.embedding:
                rows = kernels.packed_rows(packed, args[0].reshape(-1))
                return rows.view(*args[0].shape, packed.columns)
        return NotImplemented


class PackedLinear(nn.Module):
    """A linear map with a packed weight; `weight` serves as nn.Linear's does."""

    def __init__(self, weight: PackedMatrix, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x_TK: Tensor) -> Tensor:
        """Returns [T, N]."""
        out: Tensor = self.weight.kernels.packed_linear(x_TK, self.weight.packed, self.bias)
        return out


class PackedEmbedding(nn.Module):
    """An embedding whose table is packed."""

    def __init__(self, weight: PackedMatrix) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Returns [T, D]; raises IndexError for a token outside the table."""
        rows: Tensor = self.weight.kernels.packed_rows(self.weight.packed, tokens_T)
        return rows


class PackedGatedMLP(nn.Module):
    """What GatedMLP computes, in one kernel call."""

    def __init__(self, handle: PackedMlp, kernels: KernelSet) -> None:
        super().__init__()
        self.handle = handle
        self.packed_mlp = kernels.packed_mlp

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns [T, D]."""
        out: Tensor = self.packed_mlp(x_TD, self.handle)
        return out


class PackedGroupedQueryAttention(nn.Module):
    """What GroupedQueryAttention computes over a paged cache, in one kernel call."""

    def __init__(self, handle: PackedAttention, kernels: KernelSet) -> None:
        super().__init__()
        self.handle = handle
        self.packed_attention = kernels.packed_attention

    def forward(
        self, x_TD: Tensor, batch: PackedBatch, state: PagedKeysValues | None = None
    ) -> Tensor:
        """Returns [T, D]."""
        assert state is not None, "packed attention needs a cache; build with pack=False"
        out: Tensor = self.packed_attention(
            x_TD,
            self.handle,
            batch.positions_T,
            state.keys_PKSH,
            state.values_PKSH,
            batch.starts_B1,
            batch.contexts_B,
            batch.tables[state.group],
        )
        return out
