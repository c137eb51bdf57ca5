"""Owns a mixture of routed and shared experts as plain modules; knows no rank.

`RoutedExperts` ends where partial sums of ranks are added up: before the norm of the sum.

Shape letters: T tokens, D model width, L width experts work in.
"""

from torch import Tensor, nn

from firstlight.kernels.registry import KernelSet
from firstlight.layers.experts import DenseExperts, ExpertShape, Mxfp4Experts, Router
from firstlight.layers.gated_mlp import gated_mlp
from firstlight.layers.norm import RMSNorm


class RoutedExperts(nn.Module):
    """Router, the way into the experts' width, and the experts: one partial sum over ranks."""

    def __init__(self, shape: ExpertShape, kernels: KernelSet) -> None:
        super().__init__()
        self.router = Router(shape)
        if shape.latent is not None:
            self.down_proj = nn.Linear(shape.hidden, shape.latent, bias=False)
        self.has_latent = shape.latent is not None
        experts = Mxfp4Experts if shape.quantised else DenseExperts
        self.experts: nn.Module = experts(shape, kernels)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns the weighted sum of the experts at hand, [T, L]; the router sees x itself."""
        ids_TK, weights_TK = self.router(x_TD)
        inner_TL = self.down_proj(x_TD) if self.has_latent else x_TD
        out_TL: Tensor = self.experts(inner_TL, ids_TK, weights_TK)
        return out_TL


class LatentMoE(nn.Module):
    """up(norm(sum of routed experts)) + shared(x); up and norm only where there is a latent."""

    def __init__(self, shape: ExpertShape, shared_width: int, kernels: KernelSet) -> None:
        super().__init__()
        self.routed = RoutedExperts(shape, kernels)
        if shape.latent is not None:
            self.up_proj = nn.Linear(shape.latent, shape.hidden, bias=False)
        if shape.latent_norm:
            self.norm = RMSNorm(shape.inner, shape.norm_epsilon, kernels)
        self.has_shared = shared_width > 0
        if self.has_shared:
            self.shared = gated_mlp(shape.hidden, shared_width, shape.activation, kernels)
        self.shape = shape

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns [T, D]."""
        routed_TL = self.routed(x_TD)
        if self.shape.latent_norm:
            routed_TL = self.norm(routed_TL)
        if self.shape.latent is not None:
            routed_TL = self.up_proj(routed_TL)
        out: Tensor = routed_TL + self.shared(x_TD) if self.has_shared else routed_TL
        return out
