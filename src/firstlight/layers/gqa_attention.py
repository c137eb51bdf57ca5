"""Owns grouped-query attention as a plain module; knows no rank and no cache policy.

Shape letters: T tokens, D model width, N query heads, K KV heads, H head width. N and K come from
the weights at hand, so one forward serves every tensor parallel degree.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from firstlight.kernels.registry import KernelSet
from firstlight.layers.layer_state import KeysValues, PagedKeysValues, QuantisedKeysValues
from firstlight.layers.norm import RMSNorm
from firstlight.layers.packed_batch import PackedBatch
from firstlight.layers.paged_attention import PagedCall, PagedKernels
from firstlight.layers.patterned_attention import attend_pattern, is_patterned
from firstlight.layers.rotary import RotaryTable
from firstlight.sharding.attention_pattern import FULL, AttentionPattern


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of one attention layer. `norm_epsilon` is set when queries and keys are
    normalised per head; `window` bounds how far back a token sees."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    norm_epsilon: float | None = None
    window: int | None = None


class GroupedQueryAttention(nn.Module):
    """softmax(q k^T / sqrt(H)) v with fewer KV heads than query heads (arXiv:2305.13245)."""

    def __init__(
        self, shape: AttentionShape, kernels: KernelSet, rotary: RotaryTable | None
    ) -> None:
        super().__init__()
        q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q_rows, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, kv_rows, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, kv_rows, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(q_rows, shape.hidden, bias=shape.output_bias)
        if shape.norm_epsilon is not None:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_epsilon, kernels)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_epsilon, kernels)
        self.shape = shape
        self.kernels = kernels
        self.scale = shape.head_dim**-0.5
        self.pattern: AttentionPattern = FULL
        # One table serves all layers; as a plain attribute it is not registered once per layer.
        self.__dict__["rotary"] = rotary

    def forward(self, x_TD: Tensor, batch: PackedBatch, state: KeysValues | None = None) -> Tensor:
        """Returns [T, D]. Without a state tokens attend within the batch: that is training."""
        if state is None:
            out_TNH = self._attend_within(x_TD, batch)
        elif is_patterned(self.pattern, state):
            heads = self._rotated(x_TD, batch)
            out_TNH = attend_heads(heads, batch, state, PatternedHeads.of(self))
        elif isinstance(state, QuantisedKeysValues):
            out_TNH = self._attend_quantised(x_TD, batch, state)
        else:
            out_TNH = self._attend_paged(x_TD, batch, state)
        out: Tensor = self.kernels.linear(
            out_TNH.view(out_TNH.shape[0], -1), self.o_proj.weight, self.o_proj.bias
        )
        return out

    def _attend_within(self, x_TD: Tensor, batch: PackedBatch) -> Tensor:
        out_TNH: Tensor = self.kernels.attention(
            *self._rotated(x_TD, batch), batch.starts_B1, self.scale, self.shape.window
        )
        return out_TNH

    def _attend_quantised(
        self, x_TD: Tensor, batch: PackedBatch, state: QuantisedKeysValues
    ) -> Tensor:
        out_TNH: Tensor = self.kernels.int8_paged_attention(
            *self._rotated(x_TD, batch),
            *quantised_pages(batch, state),
            self.scale,
            self.shape.window,
        )
        return out_TNH

    def _rotated(self, x_TD: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        q_TNH, k_TKH, v_TKH = self._project(x_TD)
        rotary = self.__dict__["rotary"]
        if rotary is not None:
            q_TNH, k_TKH = self.kernels.rotary(
                q_TNH, k_TKH, batch.positions_T, rotary.cos_PR, rotary.sin_PR
            )
        return q_TNH, k_TKH, v_TKH

    def _attend_paged(self, x_TD: Tensor, batch: PackedBatch, state: PagedKeysValues) -> Tensor:
        heads = self._project(x_TD)
        pages = (
            state.keys_PKSH,
            state.values_PKSH,
            batch.starts_B1,
            batch.contexts_B,
            batch.tables[state.group],
            self.scale,
            self.shape.window,
        )
        rotary = self.__dict__["rotary"]
        if rotary is None:
            plain_TNH: Tensor = self.kernels.paged_attention(*heads, *pages)
            return plain_TNH
        angles = (batch.positions_T, rotary.cos_PR, rotary.sin_PR)
        out_TNH: Tensor = self.kernels.rotary_paged_attention(*heads, *angles, *pages)
        return out_TNH

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_TD, k_TD, v_TD = self.kernels.linear_group(
            x_TD, tuple(p.weight for p in projections), tuple(p.bias for p in projections)
        )
        size = (x_TD.shape[0], -1, self.shape.head_dim)
        q_TNH, k_TKH = q_TD.view(size), k_TD.view(size)
        if self.shape.norm_epsilon is not None:  # as rows: so native kernels take them
            q_TNH = self.q_norm(q_TNH.flatten(0, 1)).view(size)
            k_TKH = self.k_norm(k_TKH.flatten(0, 1)).view(size)
        return q_TNH, k_TKH, v_TD.view(size)


class PatternedHeads(NamedTuple):
    """What attention of heads needs where it is not the plain one over near pages."""

    kernels: KernelSet
    pattern: AttentionPattern
    scale: float
    window: int | None

    @classmethod
    def of(cls, layer: GroupedQueryAttention) -> "PatternedHeads":
        """Returns that of a layer."""
        return cls(layer.kernels, layer.pattern, layer.scale, layer.shape.window)


def attend_heads(
    heads: tuple[Tensor, Tensor, Tensor],
    batch: PackedBatch,
    state: KeysValues,
    how: PatternedHeads,
) -> Tensor:
    """Attends rotated queries as the pattern says, wherever pages lie; returns [T, N, H]."""
    q_TNH, k_TKH, v_TKH = heads
    assert batch.contexts_B is not None
    call = PagedCall(
        q_TNH,
        (k_TKH, v_TKH),
        batch.bounds,
        batch.starts_B1,
        batch.contexts_B,
        batch.tables[state.group],
        how.scale,
    )
    kernels = how.kernels
    if isinstance(state, QuantisedKeysValues):
        whole, segment = kernels.int8_paged_attention, kernels.int8_segment_attention
    else:
        whole, segment = kernels.paged_attention, kernels.segment_attention
    chosen = PagedKernels(whole, segment, kernels.linear, v_TKH.shape[2], latent=False)
    return attend_pattern(call, state, chosen, how.pattern, how.window)


def quantised_pages(batch: PackedBatch, state: QuantisedKeysValues) -> tuple[Any, ...]:
    """What `int8_paged_attention` takes between the new tokens and the scale."""
    return (
        state.keys_PKSH,
        state.key_scales_PKS,
        state.values_PKSH,
        state.value_scales_PKS,
        batch.starts_B1,
        batch.contexts_B,
        batch.tables[state.group],
    )
