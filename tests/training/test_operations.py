"""Each operation with a gradient of its own gives the plain kernel's values and gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.kernels.activation import Activation
from firstlight.kernels.builtin import reference_kernels
from firstlight.training.operations import training_kernels

STARTS = torch.tensor([0, 5, 5, 40, 117], dtype=torch.int32)
TOKENS = 117
SITU = Activation(4.0, 25.0)
# fp32 sums against fp64, relative to the largest value of a tensor.
TOLERANCE = 3e-6


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) * scale


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def delta_inputs(channels: int) -> list[Tensor]:
    size = (TOKENS, 2, channels)
    decay = -torch.rand(size, dtype=torch.float64) * 0.3
    beta = torch.rand(TOKENS, 2, dtype=torch.float64)
    return [unit(draw(*size)) * channels**-0.5, unit(draw(*size)), draw(*size), decay, beta]


CASES: dict[str, tuple[str, Callable[[], list[Tensor]], tuple[Any, ...]]] = {
    "gate": ("gated_activation", lambda: [draw(50, 70, scale=9), draw(50, 70, scale=30)], (SITU,)),
    "norm": ("rms_norm", lambda: [draw(50, 4, 32), draw(32)], (1e-5,)),
    "mix": ("residual_mix", lambda: [draw(50, 3, 48), draw(50, 48), draw(48, scale=0.1)], (1e-5,)),
    "convolution": ("short_conv", lambda: [draw(TOKENS, 24), draw(24, 1, 4)], (STARTS,)),
    "rule 16": ("delta_rule", lambda: delta_inputs(16), (STARTS,)),
    "rule 32": ("delta_rule", lambda: delta_inputs(32), (STARTS,)),
    "rule 64": ("delta_rule", lambda: delta_inputs(64), (STARTS,)),
    "rule of a size not compiled": ("delta_rule", lambda: delta_inputs(24), (STARTS,)),
    "attention": (
        "attention",
        lambda: [draw(TOKENS, 2, 8), draw(TOKENS, 2, 8), draw(TOKENS, 2, 8)],
        (STARTS, 0.3),
    ),
}


def values_and_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], rest: tuple[Any, ...]
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves, *rest)
    torch.manual_seed(2)
    toward = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    # A view of other strides, as a layer behind may hand one back.
    toward = toward.transpose(0, 1).contiguous().transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, toward)]


@pytest.mark.parametrize("name", list(CASES))
def test_values_and_gradients_are_the_plain_ones(name: str) -> None:
    torch.manual_seed(1)
    operation, make, rest = CASES[name]
    inputs = make()
    want = values_and_gradients(reference_kernels()[operation], inputs, rest)
    narrow = [x.float() for x in inputs]
    found = values_and_gradients(training_kernels()[operation], narrow, rest)
    for exact, got in zip(want, found, strict=True):
        assert (got.double() - exact).abs().max() <= TOLERANCE * max(1.0, exact.abs().max())


def test_experts_sorted_by_rows_are_the_plain_experts() -> None:
    torch.manual_seed(1)
    shares, ids = torch.rand(60, 16, dtype=torch.float64).topk(2)
    w1, w3, w2 = draw(16, 24, 8), draw(16, 24, 8), draw(16, 8, 24)
    inputs = [draw(60, 8), shares, w1, w3, w2]

    def call(kernels: Any) -> Callable[..., Tensor]:
        return lambda x, s, one, three, two: kernels.experts(x, ids, s, one, three, two, 0, SITU)

    want = values_and_gradients(call(reference_kernels()), inputs, ())
    found = values_and_gradients(call(training_kernels()), [x.float() for x in inputs], ())
    for exact, got in zip(want, found, strict=True):
        assert (got.double() - exact).abs().max() <= TOLERANCE * max(1.0, exact.abs().max())


def test_an_expert_nobody_chose_has_no_gradient() -> None:
    ids = torch.zeros(6, 1, dtype=torch.long)
    w1, w3, w2 = (torch.randn(2, 8, 8, requires_grad=True) for _ in range(3))
    out = training_kernels().experts(torch.randn(6, 8), ids, torch.ones(6, 1), w1, w3, w2, 0, SITU)
    out.sum().backward()
    assert w1.grad is not None and w1.grad[0].abs().max() > 0 and not w1.grad[1].any()


@pytest.mark.parametrize("value", [1e4, -1e4, 200.0, -200.0])
def test_extreme_gates_stay_finite(value: float) -> None:
    gate = torch.full((4, 4), value, requires_grad=True)
    up = torch.full((4, 4), -value, requires_grad=True)
    training_kernels().gated_activation(gate, up, SITU).sum().backward()
    assert torch.isfinite(gate.grad).all() and torch.isfinite(up.grad).all()
