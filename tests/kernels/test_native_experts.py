"""Tests of the compiled MXFP4 experts against the reference and fp64, and of what they don't take.

Shape letters: T tokens, K chosen experts a token, L input width.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firstlight.kernels.activation import SILU, Activation
from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.mxfp4 import Mxfp4
from firstlight.kernels.native import load_native

KERNELS = [
    pytest.param(kernel.function, id=kernel.name)
    for kernel in builtin_kernels().of("experts_mxfp4")
    if kernel.name != "reference" and kernel.needs.reason_against(machine_query()) is None
]
REFERENCE = reference_kernels().experts_mxfp4
SITU = Activation(4.0, 25.0)
# experts at hand, input width, inner width, tokens, chosen experts, activation
SHAPES = [
    (4, 64, 32, 0, 2, SITU),
    (4, 64, 32, 1, 2, SITU),
    (4, 96, 160, 7, 3, SITU),
    (1, 128, 256, 4, 1, SITU),
    (3, 32, 32, 40, 2, SILU),
    (2, 544, 992, 150, 2, SITU),
    (5, 512, 1056, 33, 4, Activation(2.0)),
]

pytestmark = pytest.mark.skipif(
    not KERNELS, reason=f"native kernels: {load_native().reason or 'CPU features are missing'}"
)


def _matrices(experts: int, rows: int, columns: int, scales: tuple[int, int]) -> Mxfp4:
    packed = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
    scale = torch.randint(*scales, (experts, rows, columns // 32), dtype=torch.uint8)
    return Mxfp4(packed, scale)


def _call(
    shape: tuple[int, int, int, int, int, Activation], scales: tuple[int, int] = (118, 122)
) -> tuple[object, ...]:
    """Return random arguments; experts from 5 on are chosen, those from 6 on are at hand."""
    experts, inputs, inner, tokens, chosen, activation = shape
    torch.manual_seed(experts * 1000 + inputs + tokens)
    weights = [
        _matrices(experts, rows, columns, scales)
        for rows, columns in ((inner, inputs), (inner, inputs), (inputs, inner))
    ]
    ids = torch.rand(tokens, experts + 3).argsort(1)[:, :chosen] + 5
    return (
        torch.randn(tokens, inputs) * 3,
        ids,
        torch.rand(tokens, chosen),
        *weights,
        6,
        activation,
    )


def _in_double(call: tuple[object, ...]) -> Tensor:
    x, ids, shares, *rest = call
    assert isinstance(x, Tensor) and isinstance(shares, Tensor)
    out: Tensor = REFERENCE(x.double(), ids, shares.double(), *rest)
    return out


def _error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).abs().max()) if exact.numel() else 0.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_within_twice_the_error_of_the_reference(kernel: Callable[..., Tensor], shape) -> None:
    call = _call(shape)
    exact = _in_double(call)
    bound = 2 * _error(REFERENCE(*call), exact) + 1e-7 * float(
        exact.abs().amax() if exact.numel() else 0
    )
    assert _error(kernel(*call), exact) <= bound


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_code_and_scale_decodes_exactly(kernel: Callable[..., Tensor], tokens: int) -> None:
    # One expert whose w2 holds all 16 codes in every place, and an inner activation of ones.
    scales = torch.tensor([1, 2, 60, 100, 127, 140, 200, 246]).repeat_interleave(4)
    packed = torch.arange(256, dtype=torch.uint8).roll(3).repeat(2).view(32, 16)
    w2 = Mxfp4(packed[None], scales.to(torch.uint8).view(1, 32, 1))
    one = torch.zeros(1, 32, 16, dtype=torch.uint8)
    one[..., 0] = 2  # the first column is 1
    w13 = Mxfp4(one, torch.full((1, 32, 1), 127, dtype=torch.uint8))
    x = torch.zeros(tokens, 32)
    x[:, 0] = torch.linspace(1, 2, tokens)
    call = (
        x,
        torch.zeros(tokens, 1, dtype=torch.long),
        torch.ones(tokens, 1),
        w13,
        w13,
        w2,
        0,
        SILU,
    )
    exact = _in_double(call)
    # Numbers below 2^-126 may count as zero.
    torch.testing.assert_close(kernel(*call).double(), exact, rtol=2e-6, atol=2.0**-120)


@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_activation_holds_from_tiny_to_huge(
    kernel: Callable[..., Tensor], size: float, tokens: int
) -> None:
    call = _call((2, 64, 64, tokens, 2, SITU), (127, 128))
    x, *rest = call
    assert isinstance(x, Tensor)
    scaled = (x / 30 * size, *rest)
    exact = _in_double(scaled)
    assert torch.isfinite(exact).all()
    bound = 2 * _error(REFERENCE(*scaled), exact) + 2e-7 * float(exact.abs().max())
    assert _error(kernel(*scaled), exact) <= bound


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_infinity_of_one_token_stay_with_it(kernel: Callable[..., Tensor]) -> None:
    call = _call((2, 64, 64, 24, 2, SITU))
    x, ids, *rest = call
    assert isinstance(x, Tensor) and isinstance(ids, Tensor)
    here = torch.full_like(ids, 6)
    clean = kernel(x, here, *rest)
    x[3, 5], x[7, 1] = torch.nan, torch.inf
    out = kernel(x, here, *rest)
    assert out[3].isnan().all() and not torch.isfinite(out[7]).all()
    others = [token for token in range(24) if token not in (3, 7)]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_of_experts_elsewhere_are_zero(kernel: Callable[..., Tensor]) -> None:
    x, ids, *rest = _call((4, 64, 32, 9, 2, SITU))
    assert isinstance(ids, Tensor)
    assert not kernel(x, torch.full_like(ids, 2), *rest).any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_other_calls_go_to_the_reference(kernel: Callable[..., Tensor]) -> None:
    x, ids, shares, *rest = _call((4, 64, 32, 9, 2, SITU))
    assert isinstance(x, Tensor) and isinstance(shares, Tensor) and isinstance(ids, Tensor)
    plain = REFERENCE(x, ids, shares, *rest)
    learning = x.clone().requires_grad_()
    kernel(learning, ids, shares, *rest).sum().backward()
    assert learning.grad is not None
    assert kernel(x.bfloat16(), ids, shares, *rest).dtype == torch.bfloat16
    assert torch.equal(kernel(x.t().contiguous().t(), ids, shares, *rest), plain)
    assert torch.equal(kernel(x, ids, shares, *rest[:-1], activation=rest[-1]), plain)


@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@pytest.mark.parametrize("kernel", [*KERNELS, pytest.param(REFERENCE, id="reference")])
def test_experts_in_any_slot_and_summed_in_parts_are_the_same_bits(
    kernel: Callable[..., Tensor], shape
) -> None:
    x, ids, shares, *matrices, first, activation = _call(shape)
    assert isinstance(x, Tensor)
    experts = shape[0]
    plain = kernel(x, ids, shares, *matrices, first, activation)
    torch.manual_seed(1)
    slots = torch.randperm(experts + 2)[:experts]
    placed = []
    for matrix in matrices:
        moved = Mxfp4(*(part.new_full((experts + 2, *part.shape[1:]), 7) for part in matrix))
        for target, source in zip(moved, matrix, strict=True):
            target[slots] = source
        placed.append(moved)
    half = torch.arange(experts) < experts // 2
    total = torch.zeros_like(x)
    for part in (half, ~half):
        here = torch.where(part, slots, -1)
        total = kernel(x, ids, shares, *placed, first, activation, here, total)
    assert torch.equal(total, plain)
    assert torch.equal(kernel(x, ids, shares, *placed, first, activation, slots), plain)
