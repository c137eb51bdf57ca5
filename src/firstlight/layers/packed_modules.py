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
from firstlight.layers.gqa_attention import (
    PatternedHeads,
    attend_heads,
    quantised_pages,
)
from firstlight.layers.layer_state import KeysValues, QuantisedKeysValues
from firstlight.layers.packed_batch import PackedBatch
from firstlight.layers.patterned_attention import is_patterned
from firstlight.sharding.attention_pattern import FULL, AttentionPattern


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
        self.kernels = kernels
        self.pattern: AttentionPattern = FULL

    def forward(self, x_TD: Tensor, batch: PackedBatch, state: KeysValues | None = None) -> Tensor:
        """Returns [T, D]."""
        assert state is not None, "packed attention needs a cache; build with pack=False"
        if is_patterned(self.pattern, state):
            return self._attend_patterned(x_TD, batch, state)
        if isinstance(state, QuantisedKeysValues):
            return self._attend_quantised(x_TD, batch, state)
        out: Tensor = self.kernels.packed_attention(
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

    def _attend_patterned(self, x_TD: Tensor, batch: PackedBatch, state: KeysValues) -> Tensor:
        handle, kernels = self.handle, self.kernels
        how = PatternedHeads(kernels, self.pattern, handle.scale, handle.window)
        out_TNH = attend_heads(self._rotated(x_TD, batch), batch, state, how)
        out: Tensor = kernels.packed_linear(out_TNH.flatten(1), handle.o, handle.o_bias_N)
        return out

    def _attend_quantised(
        self, x_TD: Tensor, batch: PackedBatch, state: QuantisedKeysValues
    ) -> Tensor:
        handle, kernels = self.handle, self.kernels
        out_TNH: Tensor = kernels.int8_paged_attention(
            *self._rotated(x_TD, batch),
            *quantised_pages(batch, state),
            handle.scale,
            handle.window,
        )
        out: Tensor = kernels.packed_linear(out_TNH.flatten(1), handle.o, handle.o_bias_N)
        return out

    def _rotated(self, x_TD: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        handle, kernels = self.handle, self.kernels
        weights = ((handle.q, handle.q_bias_N), (handle.k, handle.k_bias_N))
        q_TNH, k_TKH, v_TKH = (
            kernels.packed_linear(x_TD, weight, bias).view(len(x_TD), -1, handle.head_dim)
            for weight, bias in (*weights, (handle.v, handle.v_bias_N))
        )
        if handle.q_norm_H is not None:
            q_TNH = kernels.rms_norm(q_TNH, handle.q_norm_H, handle.norm_epsilon)
        if handle.k_norm_H is not None:
            k_TKH = kernels.rms_norm(k_TKH, handle.k_norm_H, handle.norm_epsilon)
        if handle.cos_PR is not None:
            q_TNH, k_TKH = kernels.rotary(
                q_TNH, k_TKH, batch.positions_T, handle.cos_PR, handle.sin_PR
            )
        return q_TNH, k_TKH, v_TKH
