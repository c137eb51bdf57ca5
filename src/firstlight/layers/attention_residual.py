"""Owns attention over earlier residual sums of a token, and the carry that holds them.

Knows no layer order: who takes a snapshot when is the model's matter.

Shape letters: T tokens, B rows of the bank so far, D model width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from firstlight.kernels.reference.wide import wide
from firstlight.kernels.registry import KernelSet


class ResidualCarry(NamedTuple):
    """The running sum of the current block `sum_TD`, and earlier sums `bank_TBD`."""

    sum_TD: Tensor
    bank_TBD: Tensor


class ResidualMix(nn.Module):
    """softmax over <rms-normalised row, norm * query> of bank and current row, mixing those rows.

    The rows are mixed as they are; the norm acts on keys only.
    """

    def __init__(self, hidden: int, epsilon: float, kernels: KernelSet) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden))
        self.query = nn.Parameter(torch.zeros(1, hidden))
        self.epsilon = epsilon
        self.kernels = kernels

    def forward(self, carry: ResidualCarry) -> Tensor:
        """Returns the mix [T, D]; with an empty bank it is the running sum itself."""
        if carry.bank_TBD.shape[1] == 0:
            return carry.sum_TD
        query_D = wide(self.norm) * wide(self.query).squeeze(0)
        out: Tensor = self.kernels.residual_mix(carry.bank_TBD, carry.sum_TD, query_D, self.epsilon)
        return out
