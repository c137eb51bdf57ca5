"""Owns the update rules of training: AdamW for all parameters, or Muon for matrices inside layers.

It knows parameter names only as far as they tell matrices from tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_BETAS = (0.9, 0.98)
_EPSILON = 1e-9
_MOMENTUM = 0.95
# The quintic of Jordan's Muon, which drives singular values toward 1 in five steps.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
# Tables, rows that are no maps between widths, and matrices with a side of a few rows.
_NO_MATRIX = ("embed", "lm_head", "router", "query", "_conv", "patch_embed", "positions", "b_proj")


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal for matrices ("Muon is scalable", arXiv:2502.16982), AdamW for the
    rest. A matrix moves by 0.2 sqrt(longer side) of the rate, which is AdamW's usual step size.
    """

    def __init__(self, module: nn.Module, *, rate: float, weight_decay: float) -> None:
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.dim() >= 2 and not any(w in n for w in _NO_MATRIX)]
        held = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in held]
        groups = [
            {"params": matrices, "weight_decay": weight_decay, "matrices": True},
            {"params": rest, "weight_decay": 0.0, "matrices": False},
        ]
        super().__init__(groups, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        for group in self.param_groups:
            move = self._orthogonal if group["matrices"] else self._adaptive
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(move(parameter), alpha=-group["lr"])

    def _orthogonal(self, parameter: Tensor) -> Tensor:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None, "only parameters with gradients are moved"
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(grad, 1 - _MOMENTUM)
        size: float = 0.2 * max(parameter.shape[-2:]) ** 0.5
        return size * orthogonal(grad.lerp(momentum, _MOMENTUM))

    def _adaptive(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = (torch.zeros_like(parameter) for _ in range(2))
        state["step"] += 1
        grad, step = parameter.grad, float(state["step"])
        state["mean"].lerp_(grad, 1 - _BETAS[0])
        state["square"].mul_(_BETAS[1]).addcmul_(grad, grad, value=1 - _BETAS[1])
        size = (state["square"] / (1 - _BETAS[1] ** step)).sqrt_().add_(_EPSILON)
        moved: Tensor = state["mean"] / size / (1 - _BETAS[0] ** step)
        return moved


def orthogonal(matrices: Tensor) -> Tensor:
    """Returns matrices [..., rows, columns] with all singular values near 1."""
    x: Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-2, -1) if is_tall else x
    first, second, third = _QUINTIC
    for _ in range(_ITERATIONS):
        square = x @ x.transpose(-2, -1)
        x = first * x + (second * square + third * square @ square) @ x
    return x.transpose(-2, -1) if is_tall else x


def make_optimizer(
    module: nn.Module, *, rate: float, weight_decay: float, muon: bool
) -> torch.optim.Optimizer:
    """Returns Muon, or AdamW (arXiv:1711.05101) over matrices with decay and the rest without."""
    if muon:
        return Muon(module, rate=rate, weight_decay=weight_decay)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=_BETAS, eps=_EPSILON, fused=True)
