"""Owns the linear module whose product is a kernel's, with its weight as it is.

Knows no packing: it gives the bits of the packed module, which torch's own product does not.

Shape letters: T tokens, K input width, N output width.
"""

from __future__ import annotations

from torch import Tensor, nn

from firstlight.kernels.registry import KernelSet


class KernelLinear(nn.Module):
    """A linear map by the kernel for it; its parameters are named as those of nn.Linear."""

    def __init__(self, linear: nn.Linear, kernels: KernelSet) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.kernels = kernels

    def forward(self, x_TK: Tensor) -> Tensor:
        """Returns [T, N]."""
        out: Tensor = self.kernels.linear(x_TK, self.weight, self.bias)
        return out


def use_kernels(module: nn.Module, kernels: KernelSet) -> None:
    """Swaps every linear module inside for one of the kernel's, in place."""
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear:
                setattr(owner, name, KernelLinear(child, kernels))
