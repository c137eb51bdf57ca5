"""Owns the plain PyTorch form of the gated delta rule and of the short convolution before it.

It knows no layer. Kimi Delta Attention (arXiv:2510.26692): per head, with state S [K, V],
S <- diag(exp decay) S; e = beta (v - S^T k); S <- S + k e^T; o = S^T q.

Shape letters: T tokens of the step, B sequences, S sequences of one length, L their length, N
heads, K key channels, V value channels, R slots, C convolution channels, W taps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.host_copy import on_host
from firstlight.kernels.reference.spans import EqualSpans, equal_spans
from firstlight.kernels.reference.wide import wide

# Within a chunk decays are taken pairwise, so any decay is safe; longer chunks cost more of it.
CHUNK = 16
# Spans at least this long go by chunks: measured crossover of both forms below.
CHUNKED_FROM = 8


def short_conv(
    x_TC: Tensor,
    weight_C1W: Tensor,
    starts_B1: Tensor,
    inputs_RTC: Tensor | None = None,
    slots_B: Tensor | None = None,
    fresh_B: Tensor | None = None,
) -> Tensor:
    """Returns SiLU of the causal depthwise convolution of each sequence, in fp32, as x's dtype.

    y[t, c] = sum_j weight[c, j] x[t - W + 1 + j, c]. With slots, the W - 1 inputs before the span
    come from `inputs_RTC[slots[b]]` unless the sequence is fresh, and the last ones go there.
    """
    taps = weight_C1W.shape[-1]
    weight_WC = wide(weight_C1W.squeeze(1)).t()
    memory = _Memory(inputs_RTC, slots_B, fresh_B)
    parts, order = [], []
    for span in equal_spans(on_host(starts_B1).tolist(), x_TC.device):
        none_SWC = x_TC.new_zeros(len(span.sequences_S), taps - 1, x_TC.shape[1])
        before_SWC = memory.load(span, none_SWC)
        joined_SLC = torch.cat((before_SWC, x_TC[span.index_SL]), 1)
        memory.store(span, joined_SLC[:, -(taps - 1) :])
        joined_SLC = wide(joined_SLC)
        total_SLC = sum(
            joined_SLC[:, tap : tap + span.length] * weight_WC[tap] for tap in range(taps)
        )
        parts.append(functional.silu(total_SLC).flatten(0, 1))  # type: ignore[arg-type]
        order.append(span.index_SL.flatten())
    return _in_order(parts, order, x_TC)


def delta_rule(
    q_TNK: Tensor,
    k_TNK: Tensor,
    v_TNV: Tensor,
    decay_TNK: Tensor,
    beta_TN: Tensor,
    starts_B1: Tensor,
    matrices_RNKV: Tensor | None = None,
    slots_B: Tensor | None = None,
    fresh_B: Tensor | None = None,
) -> Tensor:
    """Returns o [T, N, V] in fp32; q and k are normalised and q is scaled by the caller.

    `decay_TNK` is a log (at most 0). With slots, each sequence starts from `matrices[slots[b]]`,
    from zeros if it is fresh, and leaves its state there. Long spans go by chunks, short ones
    token by token: the result is the same.
    """
    inputs = [wide(x) for x in (q_TNK, k_TNK, v_TNV, decay_TNK, beta_TN)]
    memory, parts, order = _Memory(matrices_RNKV, slots_B, fresh_B), [], []
    for span in equal_spans(on_host(starts_B1).tolist(), q_TNK.device):
        size = (len(span.sequences_S), q_TNK.shape[1], q_TNK.shape[2], v_TNV.shape[2])
        state_SNKV = memory.load(span, inputs[0].new_zeros(size))
        q, k, v, decay, beta = (x[span.index_SL] for x in inputs)
        form = chunked_delta_rule if span.length >= CHUNKED_FROM else recurrent_delta_rule
        out_SLNV, state_SNKV = form(q, k, v, decay, beta, state_SNKV)
        memory.store(span, state_SNKV)
        parts.append(out_SLNV.flatten(0, 1))
        order.append(span.index_SL.flatten())
    return _in_order(parts, order, wide(v_TNV))


def recurrent_delta_rule(
    q_SLNK: Tensor,
    k_SLNK: Tensor,
    v_SLNV: Tensor,
    decay_SLNK: Tensor,
    beta_SLN: Tensor,
    state_SNKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns (o [S, L, N, V], the state after the last token), one token after the other."""
    outputs = []
    for t in range(q_SLNK.shape[1]):
        k_SNK = k_SLNK[:, t]
        state_SNKV = state_SNKV * decay_SLNK[:, t].exp().unsqueeze(-1)
        known_SNV = torch.einsum("snkv,snk->snv", state_SNKV, k_SNK)
        error_SNV = beta_SLN[:, t].unsqueeze(-1) * (v_SLNV[:, t] - known_SNV)
        state_SNKV = state_SNKV + k_SNK.unsqueeze(-1) * error_SNV.unsqueeze(-2)
        outputs.append(torch.einsum("snkv,snk->snv", state_SNKV, q_SLNK[:, t]))
    return torch.stack(outputs, 1), state_SNKV


def chunked_delta_rule(
    q_SLNK: Tensor,
    k_SLNK: Tensor,
    v_SLNV: Tensor,
    decay_SLNK: Tensor,
    beta_SLN: Tensor,
    state_SNKV: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns the same as the recurrent form, a chunk of tokens at a time.

    With G the running sum of decays in the chunk, A[t, j] = beta_t <k_t exp(G_t - G_j), k_j> for
    j < t, and P the same of q without beta for j <= t: E = (I + A)^-1 (beta V - beta K exp(G) S0),
    O = (Q exp G) S0 + P E, S1 = diag(exp G_C) S0 + sum_j (k_j exp(G_C - G_j)) e_j^T.
    """
    outputs = []
    for begin in range(0, q_SLNK.shape[1], chunk):
        tokens = slice(begin, min(begin + chunk, q_SLNK.shape[1]))
        q, k, v, decay = (
            x[:, tokens].transpose(1, 2) for x in (q_SLNK, k_SLNK, v_SLNV, decay_SLNK)
        )
        beta_SNL1 = beta_SLN[:, tokens].transpose(1, 2).unsqueeze(-1)
        out_SNLV, state_SNKV = _one_chunk(q, k, v, decay.cumsum(2), beta_SNL1, state_SNKV)
        outputs.append(out_SNLV.transpose(1, 2))
    return torch.cat(outputs, 1), state_SNKV


def _one_chunk(
    q_SNLK: Tensor,
    k_SNLK: Tensor,
    v_SNLV: Tensor,
    sums_SNLK: Tensor,
    beta_SNL1: Tensor,
    state_SNKV: Tensor,
) -> tuple[Tensor, Tensor]:
    length = q_SNLK.shape[2]
    ones_LL = torch.ones(length, length, dtype=torch.bool, device=q_SNLK.device)
    seen_LL1 = ones_LL.tril().unsqueeze(-1)
    # Masked before the exponential: it overflows for j > t, and infinity times zero is NaN.
    apart_SNLLK = (sums_SNLK.unsqueeze(3) - sums_SNLK.unsqueeze(2)).masked_fill(~seen_LL1, 0.0)
    decayed_SNLLK = apart_SNLLK.exp() * k_SNLK.unsqueeze(2)
    among_SNLL = (decayed_SNLLK * k_SNLK.unsqueeze(3)).sum(-1).masked_fill(~ones_LL.tril(-1), 0.0)
    asked_SNLL = (decayed_SNLLK * q_SNLK.unsqueeze(3)).sum(-1).masked_fill(~ones_LL.tril(), 0.0)
    from_start_SNLK = sums_SNLK.exp()
    wanted_SNLV = beta_SNL1 * (v_SNLV - (k_SNLK * from_start_SNLK) @ state_SNKV)
    system_SNLL = beta_SNL1 * among_SNLL + torch.eye(
        length, dtype=q_SNLK.dtype, device=q_SNLK.device
    )
    error_SNLV = torch.linalg.solve_triangular(
        system_SNLL, wanted_SNLV, upper=False, unitriangular=True
    )
    out_SNLV = (q_SNLK * from_start_SNLK) @ state_SNKV + asked_SNLL @ error_SNLV
    to_end_SNLK = (sums_SNLK[:, :, -1:] - sums_SNLK).exp()
    kept_SNKV = from_start_SNLK[:, :, -1].unsqueeze(-1) * state_SNKV
    return out_SNLV, kept_SNKV + (k_SNLK * to_end_SNLK).transpose(2, 3) @ error_SNLV


class _Memory(NamedTuple):
    """What sequences keep between steps: `rows` by slot, and none of it in training."""

    rows: Tensor | None
    slots_B: Tensor | None
    fresh_B: Tensor | None

    def load(self, span: EqualSpans, empty: Tensor) -> Tensor:
        """Returns what the span's sequences kept, in the dtype of `empty`, which the fresh get."""
        if self.rows is None:
            return empty
        assert self.fresh_B is not None
        is_old = ~self.fresh_B[span.sequences_S].view(-1, *[1] * (empty.dim() - 1))
        return torch.where(is_old, self.rows[self._slots(span)].to(empty.dtype), empty)

    def store(self, span: EqualSpans, values: Tensor) -> None:
        """Keeps one row for each sequence of the span."""
        if self.rows is not None:
            self.rows[self._slots(span)] = values.to(self.rows.dtype)

    def _slots(self, span: EqualSpans) -> Tensor:
        assert self.slots_B is not None
        return self.slots_B[span.sequences_S].long()


def _in_order(parts: list[Tensor], order: list[Tensor], like: Tensor) -> Tensor:
    """Puts rows computed by groups back into the order of the batch."""
    if not parts:
        return torch.zeros_like(like)
    if len(parts) == 1:
        rows, index = parts[0], order[0]
    else:
        rows, index = torch.cat(parts), torch.cat(order)
    return rows.index_select(0, index.argsort()).to(like.dtype)
