"""Owns routed experts as plain modules: the router, and experts dense or in MXFP4; knows no rank.

Shape letters: T tokens, D model width, L width experts work in, F inner width of an expert, E
experts, K experts chosen for a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firstlight.kernels.activation import Activation
from firstlight.kernels.mxfp4 import GROUP, Mxfp4, from_mxfp4
from firstlight.kernels.reference.wide import wide
from firstlight.kernels.registry import KernelSet

_EPSILON = 1e-20  # of the sum the chosen scores are divided by


@dataclass(frozen=True)
class ExpertShape:
    """Sizes and options of routed experts. `latent` is the width they work in when it is not the
    model's; `latent_norm` normalises their sum; `renormalise` makes a token's weights add up to
    `scaling`."""

    hidden: int
    experts: int
    chosen: int
    width: int
    latent: int | None
    latent_norm: bool
    renormalise: bool
    scaling: float
    quantised: bool
    activation: Activation
    norm_epsilon: float

    @property
    def inner(self) -> int:
        """L: the width experts read and write."""
        return self.latent or self.hidden


class Router(nn.Module):
    """sigmoid(W x) in fp32; a bias takes part in the choice and not in the weights
    (arXiv:2408.15664).
    """

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.experts, shape.hidden))
        self.bias = nn.Parameter(torch.zeros(shape.experts))
        self.shape = shape

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns chosen experts [T, K] int64 and their weights [T, K] in fp32."""
        scores_TE = torch.sigmoid(nn.functional.linear(wide(x_TD), wide(self.weight)))
        ids_TK = (scores_TE.detach() + self.bias.detach()).topk(self.shape.chosen, -1).indices
        weights_TK = scores_TE.gather(-1, ids_TK)
        if self.shape.renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _EPSILON)
        return ids_TK, weights_TK * self.shape.scaling


class DenseExperts(nn.Module):
    """Experts [first, first + E) of a layer as float matrices stacked over experts."""

    def __init__(self, shape: ExpertShape, kernels: KernelSet) -> None:
        super().__init__()
        inward = (shape.experts, shape.width, shape.inner)
        self.w1 = nn.Parameter(torch.zeros(inward))
        self.w3 = nn.Parameter(torch.zeros(inward))
        self.w2 = nn.Parameter(torch.zeros(shape.experts, shape.inner, shape.width))
        self.first = 0
        self.shape = shape
        self.activation = shape.activation
        self.kernels = kernels

    def forward(self, x_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor, *slots: Tensor) -> Tensor:
        """Returns this module's part of each token's weighted sum, [T, L].

        `slots` are the kernel's: where the matrices of each expert stand when they are not all
        here, and the sum so far.
        """
        out: Tensor = self.kernels.experts(
            x_TL, ids_TK, weights_TK, self.w1, self.w3, self.w2, self.first, self.activation, *slots
        )
        return out


class Mxfp4Experts(nn.Module):
    """The same experts as they are published: MXFP4 codes and scales, never held dense."""

    def __init__(self, shape: ExpertShape, kernels: KernelSet) -> None:
        super().__init__()
        for name, rows, columns in (
            ("w1", shape.width, shape.inner),
            ("w2", shape.inner, shape.width),
            ("w3", shape.width, shape.inner),
        ):
            self._register(f"{name}_packed", (shape.experts, rows, columns // 2))
            self._register(f"{name}_scale", (shape.experts, rows, columns // GROUP))
        self.first = 0
        self.shape = shape
        self.activation = shape.activation
        self.kernels = kernels

    def _register(self, name: str, size: tuple[int, ...]) -> None:
        values = nn.Parameter(torch.zeros(size, dtype=torch.uint8), requires_grad=False)
        self.register_parameter(name, values)

    def matrix(self, name: str) -> Mxfp4:
        """Returns `w1`, `w2` or `w3` of all experts at hand."""
        return Mxfp4(self.get_parameter(f"{name}_packed"), self.get_parameter(f"{name}_scale"))

    def forward(self, x_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor, *slots: Tensor) -> Tensor:
        """Returns this module's part of each token's weighted sum, [T, L]; `slots` as above."""
        one, three, two = self.matrix("w1"), self.matrix("w3"), self.matrix("w2")
        out: Tensor = self.kernels.experts_mxfp4(
            x_TL, ids_TK, weights_TK, one, three, two, self.first, self.activation, *slots
        )
        return out


def to_dense(module: Mxfp4Experts, dtype: torch.dtype) -> DenseExperts:
    """Returns experts of the same values as float matrices, which have gradients."""
    w1_EFL, w2_ELF, w3_EFL = (from_mxfp4(module.matrix(n), dtype) for n in ("w1", "w2", "w3"))
    with torch.device("meta"):
        dense = DenseExperts(module.shape, module.kernels)
    dense.w1, dense.w2, dense.w3 = (nn.Parameter(w) for w in (w1_EFL, w2_ELF, w3_EFL))
    dense.first = module.first
    return dense
