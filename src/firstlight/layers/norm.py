"""Owns root-mean-square normalisation as a module; the arithmetic is a kernel's."""

import torch
from torch import Tensor, nn

from firstlight.kernels.registry import KernelSet


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim (arXiv:1910.07467), in fp32
    inside.
    """

    def __init__(self, dim: int, epsilon: float, kernels: KernelSet) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.epsilon = epsilon
        self.kernels = kernels

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns the normalised [T, D]."""
        out: Tensor = self.kernels.rms_norm(x_TD, self.weight, self.epsilon)
        return out

    def add(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, the sum), both [T, D], in one pass."""
        normed, total = self.kernels.add_rms_norm(x_TD, residual_TD, self.weight, self.epsilon)
        return normed, total
