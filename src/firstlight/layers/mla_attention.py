"""Owns multi-head latent attention without positions, with an output gate; no rank and no policy.

Shape letters: T tokens, D model width, N heads, C latent width, S shared key width, H own key
width, V value width, W = C + S the width of a cached row. N comes from the weights at hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firstlight.kernels.registry import KernelSet
from firstlight.layers.layer_state import Latents, PagedLatents, QuantisedLatents, page_tensors
from firstlight.layers.norm import RMSNorm
from firstlight.layers.packed_batch import PackedBatch
from firstlight.layers.paged_attention import PagedCall, PagedKernels
from firstlight.layers.patterned_attention import attend_pattern, is_patterned
from firstlight.sharding.attention_pattern import FULL, AttentionPattern

ANY_LENGTH = 1 << 30  # tokens


@dataclass(frozen=True)
class LatentShape:
    """Sizes and options of one layer. Without a `q_rank` queries are one matrix; `gated` layers
    multiply each head's output by a sigmoid of the input."""

    hidden: int
    heads: int
    q_rank: int | None
    latent: int
    own: int
    shared: int
    value: int
    gated: bool
    latent_epsilon: float


class PagedContext(NamedTuple):
    """New rows [T, W] of some sequences, their bounds, and where their earlier rows lie."""

    rows_TW: Tensor
    starts_B1: Tensor
    contexts_B: Tensor
    table_BP: Tensor

    def part(
        self, sequences: Sequence[int], bounds: Sequence[int]
    ) -> tuple[Tensor, "PagedContext"]:
        """Returns the tokens of some of the sequences, and the context of these alone."""
        device = self.rows_TW.device
        tokens = [t for s in sequences for t in range(bounds[s], bounds[s + 1])]
        starts = [0]
        for s in sequences:
            starts.append(starts[-1] + bounds[s + 1] - bounds[s])
        index_S = torch.tensor(tokens, device=device)
        chosen_B = torch.tensor(sequences, device=device)
        starts_B1 = torch.tensor(starts, dtype=self.starts_B1.dtype, device=device)
        return index_S, PagedContext(
            self.rows_TW[index_S], starts_B1, self.contexts_B[chosen_B], self.table_BP[chosen_B]
        )


class AttentionForms(NamedTuple):
    """Operations over one kind of pages, and the longest span the first is cheaper for; `segment`
    is the first for a part of the context.
    """

    absorbed: Callable[..., Tensor]
    expanded: Callable[..., Tensor]
    segment: Callable[..., Tensor]
    absorbed_up_to: int


class LatentExpansion(nn.Module):
    """The matrix [N * (H + V), C] that turns a latent into each head's keys and values."""

    def __init__(self, rows: int, latent: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, latent))

    def by_head(self, rows_of_head: int) -> Tensor:
        """Returns [N, H + V, C]."""
        return self.weight.view(-1, rows_of_head, self.weight.shape[1])


class LatentAttention(nn.Module):
    """Attention whose keys and values follow from one latent per token (arXiv:2405.04434).

    Two forms give the same result: expanded, where keys and values of each head are made, and
    absorbed, where the query is multiplied by the expansion and attends to latents directly.
    """

    def __init__(self, shape: LatentShape, kernels: KernelSet) -> None:
        super().__init__()
        query_rows = shape.heads * (shape.own + shape.shared)
        if shape.q_rank is None:
            self.q_proj = nn.Linear(shape.hidden, query_rows, bias=False)
        else:
            self.q_a_proj = nn.Linear(shape.hidden, shape.q_rank, bias=False)
            self.q_a_norm = RMSNorm(shape.q_rank, shape.latent_epsilon, kernels)
            self.q_b_proj = nn.Linear(shape.q_rank, query_rows, bias=False)
        self.kv_a_proj = nn.Linear(shape.hidden, shape.latent + shape.shared, bias=False)
        self.kv_a_norm = RMSNorm(shape.latent, shape.latent_epsilon, kernels)
        self.kv_b_proj = LatentExpansion(shape.heads * (shape.own + shape.value), shape.latent)
        if shape.gated:
            self.g_proj = nn.Linear(shape.hidden, shape.heads * shape.value, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.value, shape.hidden, bias=False)
        self.shape = shape
        self.kernels = kernels
        self.scale = (shape.own + shape.shared) ** -0.5
        self.pattern: AttentionPattern = FULL
        self._forms = {
            PagedLatents: AttentionForms(
                kernels.latent_attention,
                kernels.expanded_latent_attention,
                kernels.segment_latent_attention,
                absorbed_up_to(shape, plain=kernels.is_plain("latent_attention")),
            ),
            QuantisedLatents: AttentionForms(
                kernels.int8_latent_attention,
                kernels.int8_expanded_latent_attention,
                kernels.int8_segment_latent_attention,
                absorbed_up_to(shape, plain=kernels.is_plain("int8_latent_attention")),
            ),
        }

    def forward(self, x_TD: Tensor, batch: PackedBatch, state: Latents | None = None) -> Tensor:
        """Returns [T, D]. Without a state tokens attend within the batch: that is training."""
        q_TNK, rows_TW = self._queries(x_TD), self._rows(x_TD)
        if state is None:
            out_TNV = self._attend_within(q_TNK, rows_TW, batch)
        else:
            out_TNV = self._attend_paged(q_TNK, rows_TW, batch, state)
        out_TP = out_TNV.flatten(1)
        if self.shape.gated:
            out_TP = out_TP * torch.sigmoid(self.g_proj(x_TD))
        out: Tensor = self.o_proj(out_TP)
        return out

    def _queries(self, x_TD: Tensor) -> Tensor:
        if self.shape.q_rank is None:
            q_TP = self.q_proj(x_TD)
        else:
            q_TP = self.q_b_proj(self.q_a_norm(self.q_a_proj(x_TD)))
        q_TNK: Tensor = q_TP.view(x_TD.shape[0], -1, self.shape.own + self.shape.shared)
        return q_TNK

    def _rows(self, x_TD: Tensor) -> Tensor:
        """What is cached of a token: its normed latent and the key part all heads share."""
        both_TW = self.kv_a_proj(x_TD)
        latent_TC = self.kv_a_norm(both_TW[:, : self.shape.latent])
        return torch.cat((latent_TC, both_TW[:, self.shape.latent :]), -1)

    def _expansion(self) -> Tensor:
        return self.kv_b_proj.by_head(self.shape.own + self.shape.value)

    def _attend_within(self, q_TNK: Tensor, rows_TW: Tensor, batch: PackedBatch) -> Tensor:
        both_TNO = torch.einsum("tc,noc->tno", rows_TW[:, : self.shape.latent], self._expansion())
        shared_TNS = rows_TW[:, None, self.shape.latent :].expand(-1, both_TNO.shape[1], -1)
        keys_TNK = torch.cat((both_TNO[..., : self.shape.own], shared_TNS), -1)
        out_TNV: Tensor = self.kernels.attention(
            q_TNK, keys_TNK, both_TNO[..., self.shape.own :], batch.starts_B1, self.scale
        )
        return out_TNV

    def _attend_paged(
        self, q_TNK: Tensor, rows_TW: Tensor, batch: PackedBatch, state: Latents
    ) -> Tensor:
        assert batch.contexts_B is not None
        if is_patterned(self.pattern, state):
            return self._attend_patterned(q_TNK, rows_TW, batch, state)
        context = PagedContext(
            rows_TW, batch.starts_B1, batch.contexts_B, batch.tables[state.group]
        )
        limit = self._forms[type(state)].absorbed_up_to
        if batch.num_tokens <= limit:  # no span can be longer
            return self._absorbed(q_TNK, context, state)
        long = [end - begin > limit for begin, end in pairwise(batch.bounds)]
        attend = {True: self._expanded, False: self._absorbed}
        if len(set(long)) <= 1:
            return attend[any(long)](q_TNK, context, state)
        out_TNV = q_TNK.new_empty(*q_TNK.shape[:2], self.shape.value)
        for is_long, form in attend.items():
            chosen = [index for index, value in enumerate(long) if value == is_long]
            index_S, part = context.part(chosen, batch.bounds)
            out_TNV[index_S] = form(q_TNK[index_S], part, state)
        return out_TNV

    def _expanded(self, q_TNK: Tensor, context: PagedContext, state: Latents) -> Tensor:
        out_TNV: Tensor = self._forms[type(state)].expanded(
            q_TNK,
            context.rows_TW,
            self._expansion(),
            *page_tensors(state),
            context.starts_B1,
            context.contexts_B,
            context.table_BP,
            self.scale,
        )
        return out_TNV

    def _attend_patterned(
        self, q_TNK: Tensor, rows_TW: Tensor, batch: PackedBatch, state: Latents
    ) -> Tensor:
        """Always in the absorbed form: which form is cheaper would change with the pages' place."""
        assert batch.contexts_B is not None
        q_TNW, values_NVC = self._absorb(q_TNK)
        forms = self._forms[type(state)]
        call = PagedCall(
            q_TNW,
            (rows_TW,),
            batch.bounds,
            batch.starts_B1,
            batch.contexts_B,
            batch.tables[state.group],
            self.scale,
        )
        kernels = PagedKernels(
            forms.absorbed, forms.segment, self.kernels.linear, self.shape.latent, latent=True
        )
        mixed_TNC = attend_pattern(call, state, kernels, self.pattern)
        return torch.einsum("tnc,nvc->tnv", mixed_TNC, values_NVC)

    def _absorbed(self, q_TNK: Tensor, context: PagedContext, state: Latents) -> Tensor:
        q_TNW, values_NVC = self._absorb(q_TNK)
        mixed_TNC = self._forms[type(state)].absorbed(
            q_TNW,
            context.rows_TW,
            *page_tensors(state),
            context.starts_B1,
            context.contexts_B,
            context.table_BP,
            self.scale,
            self.shape.latent,
        )
        return torch.einsum("tnc,nvc->tnv", mixed_TNC, values_NVC)

    def _absorb(self, q_TNK: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries that meet cached rows, and the values' part of the expansion."""
        keys_NHC, values_NVC = torch.split(self._expansion(), [self.shape.own, self.shape.value], 1)
        absorbed_TNC = torch.einsum("tnh,nhc->tnc", q_TNK[..., : self.shape.own], keys_NHC)
        return torch.cat((absorbed_TNC, q_TNK[..., self.shape.own :]), -1), values_NVC


def absorbed_up_to(shape: LatentShape, *, plain: bool = True) -> int:
    """Returns the tokens of a span up to which the absorbed form is the cheaper one.

    A kernel made for it wins at every length measured, by 2.3 times at 256 tokens of K3's shape
    (docs/benchmarks/kimi-k3.md). In plain operations the multiplications decide.

    Per context row and head, T queries cost T (W + C) absorbed, and C (H + V) + T (H + S + V)
    expanded, whatever the context's length.
    """
    if not plain:
        return ANY_LENGTH
    saved = 2 * shape.latent + shape.shared - (shape.own + shape.shared + shape.value)
    if saved <= 0:
        return ANY_LENGTH
    return shape.latent * (shape.own + shape.value) // saved
