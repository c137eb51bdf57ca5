"""Owns the SiLU-gated feed-forward as a plain module; knows no rank."""

from torch import Tensor, nn

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
