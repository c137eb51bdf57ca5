"""Owns Kimi Delta Attention as a plain module; knows no rank and no cache policy.

Shape letters: T tokens, D model width, N heads, H head width, P = N * H. N comes from the weights
at hand, so one forward serves every tensor parallel degree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from firstlight.kernels.reference.wide import wide
from firstlight.kernels.registry import KernelSet
from firstlight.layers.layer_state import RecurrentSlots
from firstlight.layers.norm import RMSNorm
from firstlight.layers.packed_batch import PackedBatch

NORM_EPSILON = 1e-6  # of the L2 norm of queries and keys


@dataclass(frozen=True)
class DeltaShape:
    """Sizes and options of one layer. `lower_bound` bounds the log decay (None: softplus form);
    `full_rank_gate` chooses one matrix, else two of rank `head_dim`, for the output gate."""

    hidden: int
    heads: int
    head_dim: int
    taps: int
    lower_bound: float | None
    full_rank_gate: bool
    norm_epsilon: float
    decay_shape: tuple[int, ...] = ()


class ShortConvolution(nn.Module):
    """The weight of a causal depthwise convolution, [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps))


class DeltaAttention(nn.Module):
    """Gated delta rule with a decay per key channel, short convolutions and an output gate
    (arXiv:2510.26692).
    """

    def __init__(self, shape: DeltaShape, kernels: KernelSet) -> None:
        super().__init__()
        rows = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, rows, bias=False)
        self.k_proj = nn.Linear(shape.hidden, rows, bias=False)
        self.v_proj = nn.Linear(shape.hidden, rows, bias=False)
        self.q_conv = ShortConvolution(rows, shape.taps)
        self.k_conv = ShortConvolution(rows, shape.taps)
        self.v_conv = ShortConvolution(rows, shape.taps)
        self.f_a_proj = nn.Linear(shape.hidden, shape.head_dim, bias=False)
        self.f_b_proj = nn.Linear(shape.head_dim, rows, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(rows))
        self.A_log = nn.Parameter(torch.zeros(shape.decay_shape or (shape.heads,)))
        self.b_proj = nn.Linear(shape.hidden, shape.heads, bias=False)
        if shape.full_rank_gate:
            self.g_proj = nn.Linear(shape.hidden, rows, bias=False)
        else:
            self.g_a_proj = nn.Linear(shape.hidden, shape.head_dim, bias=False)
            self.g_b_proj = nn.Linear(shape.head_dim, rows, bias=False)
        self.o_norm = RMSNorm(shape.head_dim, shape.norm_epsilon, kernels)
        self.o_proj = nn.Linear(rows, shape.hidden, bias=False)
        self.shape = shape
        self.kernels = kernels

    def forward(
        self, x_TD: Tensor, batch: PackedBatch, state: RecurrentSlots | None = None
    ) -> Tensor:
        """Returns [T, D]. Without a state every sequence starts from nothing: that is training."""
        q_TNH, k_TNH, v_TNH = self._convolved(x_TD, batch, state)
        q_TNH = _l2_normalised(q_TNH) * self.shape.head_dim**-0.5
        out_TNH = self.kernels.delta_rule(
            q_TNH,
            _l2_normalised(k_TNH),
            v_TNH,
            self._log_decay(x_TD),
            torch.sigmoid(wide(self.b_proj(x_TD))),
            batch.starts_B1,
            *(() if state is None else (state.matrices_RHKV, *_slots(batch, state))),
        )
        gated_TNH = self.o_norm(out_TNH) * torch.sigmoid(wide(self._gate(x_TD)))
        out: Tensor = self.o_proj(gated_TNH.flatten(1).to(x_TD.dtype))
        return out

    def _convolved(
        self, x_TD: Tensor, batch: PackedBatch, state: RecurrentSlots | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values after their convolutions, in the wide dtype, [T, N, H]."""
        projected = (self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD))
        weights = (self.q_conv.weight, self.k_conv.weight, self.v_conv.weight)
        out_TC = self.kernels.short_conv(
            torch.cat(projected, -1),
            torch.cat(weights),
            batch.starts_B1,
            *(() if state is None else (state.inputs_RTC, *_slots(batch, state))),
        )
        q, k, v = (wide(part) for part in out_TC.chunk(3, -1))
        size = (x_TD.shape[0], -1, self.shape.head_dim)
        return q.reshape(size), k.reshape(size), v.reshape(size)

    def _log_decay(self, x_TD: Tensor) -> Tensor:
        """Log decay [T, N, H] of each key channel; negative, above `lower_bound` where there is
        one.
        """
        logits_TP = wide(self.f_b_proj(self.f_a_proj(x_TD))) + wide(self.dt_bias)
        logits_TNH = logits_TP.view(x_TD.shape[0], -1, self.shape.head_dim)
        speed_N1 = wide(self.A_log).exp().reshape(-1, 1)
        if self.shape.lower_bound is None:
            return -speed_N1 * functional.softplus(logits_TNH)
        return self.shape.lower_bound * torch.sigmoid(speed_N1 * logits_TNH)

    def _gate(self, x_TD: Tensor) -> Tensor:
        gate_TP: Tensor = (
            self.g_proj(x_TD) if self.shape.full_rank_gate else self.g_b_proj(self.g_a_proj(x_TD))
        )
        return gate_TP.view(x_TD.shape[0], -1, self.shape.head_dim)


def _slots(batch: PackedBatch, state: RecurrentSlots) -> tuple[Tensor, Tensor]:
    """The slot of each sequence, and whether it begins with this step."""
    return batch.tables[state.group][:, 0], batch.fresh_B


def _l2_normalised(x_TNH: Tensor) -> Tensor:
    return x_TNH * torch.rsqrt(x_TNH.square().sum(-1, keepdim=True) + NORM_EPSILON)
