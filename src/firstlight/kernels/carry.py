"""Owns what queries carry from one segment of their context to the next; knows no kernel.

Shape letters: T tokens, N query heads, V value channels, E = V + 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.reference.wide import wide


def new_carry(q_TNH: Tensor, width: int) -> Tensor:
    """Returns [T, N, E] of queries that have seen nothing: greatest score, sum of exponentials
    less that score, and values weighed by them, in fp32 or wider.
    """
    size = (*q_TNH.shape[:2], width + 2)
    carry_TNE = torch.zeros(size, dtype=wide(q_TNH[:0]).dtype, device=q_TNH.device)
    carry_TNE[..., 0] = -torch.inf
    return carry_TNE


def carried(carry_TNE: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what queries attend to, [T, N, V], once they have seen their whole context."""
    return (carry_TNE[..., 2:] * carry_TNE[..., 1:2].reciprocal()).to(dtype)
