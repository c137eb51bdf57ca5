"""Owns the gated feed-forward as a plain module; knows no rank."""

from torch import Tensor, nn

from firstlight.kernels.activation import SILU, Activation
from firstlight.kernels.registry import KernelSet


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x) (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, hidden: int, width: int, kernels: KernelSet, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.kernels = kernels

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns [T, D]."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        inner_TF = self.kernels.gated_mlp_in(x_TD, gate.weight, up.weight, gate.bias, up.bias)
        out: Tensor = self.kernels.linear(inner_TF, down.weight, down.bias)
        return out


class SituMLP(nn.Module):
    """down(situ(gate x, up x)): the feed-forward of Kimi K3, bounded in both factors."""

    def __init__(self, hidden: int, width: int, activation: Activation, kernels: KernelSet) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.activation = activation
        self.kernels = kernels

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns [T, D]."""
        inner_TF = self.kernels.gated_activation(
            self.gate_proj(x_TD), self.up_proj(x_TD), self.activation
        )
        out: Tensor = self.down_proj(inner_TF)
        return out


def gated_mlp(hidden: int, width: int, activation: Activation, kernels: KernelSet) -> nn.Module:
    """Returns the feed-forward, without biases, for an activation."""
    if activation == SILU:
        return GatedMLP(hidden, width, kernels)
    return SituMLP(hidden, width, activation, kernels)
