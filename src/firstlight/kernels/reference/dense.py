"""Owns the plain PyTorch form of norms, linear maps, the gated MLP input, rotation and greedy.

It is the meaning of these operations, on any device and float dtype; it knows no speed.

Shape letters: T tokens, D model width, K input width, N output width or query heads, H head
channels, P positions in the rotary tables, R rotated channel pairs, B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.reference.wide import wide


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """Scale each row to unit root mean square in fp32 or wider, cast back, then multiply by the
    weight.
    """
    wide_TD = wide(x_TD)
    inverse_T1 = torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight_D * (wide_TD * inverse_T1).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and that sum."""
    sum_TD = x_TD + residual_TD
    return rms_norm(sum_TD, weight_D, epsilon), sum_TD


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x times the transposed weight, plus the bias."""
    return functional.linear(x_TK, weight_NK, bias_N)


def linear_add(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, residual_TN: Tensor
) -> Tensor:
    """Return linear(x) plus the residual, as a new tensor."""
    return functional.linear(x_TK, weight_NK, bias_N) + residual_TN


def linear_group(
    x_TK: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Apply several linear maps to one input; one output for each weight, in order."""
    if len(weights) != len(biases):
        raise ValueError(f"{len(weights)} weights but {len(biases)} biases")
    return tuple(
        functional.linear(x_TK, weight_NK, bias_N)
        for weight_NK, bias_N in zip(weights, biases, strict=True)
    )


def gated_mlp_in(
    x_TK: Tensor,
    gate_NK: Tensor,
    up_NK: Tensor,
    gate_bias_N: Tensor | None = None,
    up_bias_N: Tensor | None = None,
) -> Tensor:
    """Return silu(gate(x)) * up(x)."""
    gate_TN = functional.silu(functional.linear(x_TK, gate_NK, gate_bias_N))
    return gate_TN * functional.linear(x_TK, up_NK, up_bias_N)


def rotary(
    q_TNH: Tensor, k_TKH: Tensor, positions_T: Tensor, cos_PR: Tensor, sin_PR: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the first 2R channels of q and k by their positions (int64), halves paired.

    Channel i pairs with channel i + R; later channels pass through. Raises IndexError when a
    position lies outside the tables.
    """
    cos_T1R = cos_PR[positions_T].unsqueeze(1)
    sin_T1R = sin_PR[positions_T].unsqueeze(1)
    return _rotated(q_TNH, cos_T1R, sin_T1R), _rotated(k_TKH, cos_T1R, sin_T1R)


def greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first greatest logit's index (int64) and its log-softmax (fp32) for each row.

    A row that holds NaN gives a log-probability of NaN.
    """
    wide_BV = logits_BV.float()
    ids_B = wide_BV.argmax(-1)
    top_B = wide_BV.gather(-1, ids_B.unsqueeze(-1)).squeeze(-1)
    return ids_B, top_B - wide_BV.logsumexp(-1)


def _rotated(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    pairs = cos_T1R.shape[-1]
    cos_T1R, sin_T1R = cos_T1R.to(x_TNH.dtype), sin_T1R.to(x_TNH.dtype)
    first, second = x_TNH[..., :pairs], x_TNH[..., pairs : 2 * pairs]
    turned = (first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R)
    return torch.cat((*turned, x_TNH[..., 2 * pairs :]), dim=-1)
