"""Tests of the compiled delta rule, short convolution, residual mix and gated activation.

Each against its reference and fp64: at most twice the reference's own fp32 error, and a few units
in the last place of the greatest number. Shape letters as in kernels/reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.activation import SILU, Activation
from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native

NATIVE = builtin_kernels().resolve(machine_query())
REFERENCE = reference_kernels()
CHOSEN = next(line for line in NATIVE.describe() if line.startswith("delta_rule"))

pytestmark = pytest.mark.skipif(
    "native" not in CHOSEN, reason=f"native kernels: {load_native().reason or CHOSEN}"
)

# starts, heads, key channels, value channels
SHAPES = [
    ([0], 1, 16, 16),
    ([0, 1], 2, 16, 16),
    ([0, 1, 3, 20, 20, 57], 3, 128, 128),
    ([0, 5, 40], 2, 24, 40),
    ([0, 50], 1, 33, 70),
    ([0, 11, 23, 100], 2, 64, 32),
    ([0, 1, 2, 3, 4, 5], 2, 7, 100),
    ([0, 200], 1, 1, 1),
]
STATE = 6  # index of the matrices among the arguments


def _call(shape: tuple[list[int], int, int, int], decay: float = 5.0) -> list[Tensor]:
    """Return arguments with slots; every third sequence is fresh, its slot holds NaN."""
    starts, heads, keys, values = shape
    torch.manual_seed(starts[-1] * 7 + keys)
    tokens, sequences = starts[-1], len(starts) - 1
    q, k = functional.normalize(torch.randn(2, tokens, heads, keys), dim=-1)
    gamma = -decay * torch.sigmoid(torch.randn(tokens, heads, keys) * 2 - 1)
    fresh = torch.arange(sequences) % 3 == 1
    slots = torch.randperm(sequences + 2)[:sequences]
    matrices = torch.randn(sequences + 2, heads, keys, values)
    matrices[slots[fresh]] = torch.nan
    v, beta = torch.randn(tokens, heads, values), torch.rand(tokens, heads)
    return [q * keys**-0.5, k, v, gamma, beta, torch.tensor(starts).int(), matrices, slots, fresh]


def _doubled(call: Sequence[Any]) -> list[Any]:
    floats = (x.dtype == torch.float32 if isinstance(x, Tensor) else False for x in call)
    return [x.double() if is_float else x for x, is_float in zip(call, floats, strict=True)]


def _run(function: Callable[..., Tensor], call: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output and the matrices afterwards; the call's own stay as they are."""
    copied = [x.clone() if index == STATE else x for index, x in enumerate(call)]
    return function(*copied), copied[STATE].nan_to_num()


def assert_as_exact(actual: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Check against fp64: at most twice the plain form's error and 4e-7 of the greatest number."""
    assert actual.shape == exact.shape and actual.dtype == torch.float32
    if exact.numel():
        bound = 2 * float((plain.double() - exact).abs().max()) + 4e-7 * float(exact.abs().max())
        assert float((actual.double() - exact).abs().max()) <= bound


@pytest.mark.parametrize("decay", [0.01, 5.0, 40.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delta_rule(shape, decay: float) -> None:
    call = _call(shape, decay)
    exact = _run(REFERENCE.delta_rule, _doubled(call))
    plain, actual = _run(REFERENCE.delta_rule, call), _run(NATIVE.delta_rule, call)
    for one in zip(actual, plain, exact, strict=True):
        assert_as_exact(*one)
    alone = NATIVE.delta_rule(*call[:STATE])
    assert_as_exact(
        alone, REFERENCE.delta_rule(*call[:STATE]), REFERENCE.delta_rule(*_doubled(call[:STATE]))
    )


@pytest.mark.parametrize("piece", [1, 7, 16, 40])
def test_spans_in_pieces_equal_the_whole(piece: int) -> None:
    call = _call(([0, 100], 2, 64, 48))
    call[8] = torch.tensor([True])
    exact = _run(REFERENCE.delta_rule, _doubled(call))
    whole = _run(NATIVE.delta_rule, call)
    parts, matrices = [], call[STATE].clone()
    for begin in range(0, 100, piece):
        rows = [x[begin : begin + piece] for x in call[:5]]
        starts = torch.tensor([0, len(rows[0])]).int()
        fresh = torch.tensor([begin == 0])
        parts.append(NATIVE.delta_rule(*rows, starts, matrices, call[7], fresh))
    assert_as_exact(torch.cat(parts), whole[0], exact[0])
    assert_as_exact(matrices.nan_to_num(), whole[1], exact[1])


def test_tokens_and_slots_may_stand_apart() -> None:
    call = _call(([0, 3, 30], 3, 32, 32))
    expected = _run(NATIVE.delta_rule, call)
    wide = [torch.cat((x, x), 1)[:, :3] for x in call[:5]]
    held = torch.full((4, 2, 3, 32, 32), 9.0)
    held[:, 0] = call[STATE]
    out = NATIVE.delta_rule(*wide, call[5], held[:, 0], *call[7:])
    assert torch.equal(out, expected[0])
    assert torch.equal(held[:, 0].nan_to_num(), expected[1]) and (held[:, 1] == 9.0).all()


def test_what_delta_rule_does_not_take_goes_to_the_reference() -> None:
    call = _call(([0, 3, 30], 2, 16, 16))
    plain = _run(REFERENCE.delta_rule, call)
    learning = [x.clone().requires_grad_() for x in call[:5]]
    NATIVE.delta_rule(*learning, call[5]).sum().backward()
    assert all(x.grad is not None for x in learning)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in call[:4]]
    assert torch.equal(_run(NATIVE.delta_rule, [*apart, *call[4:]])[0], plain[0])
    half = [*(x.bfloat16() for x in call[:5]), *call[5:]]
    assert torch.equal(_run(NATIVE.delta_rule, half)[0], _run(REFERENCE.delta_rule, half)[0])
    with pytest.raises(IndexError):
        NATIVE.delta_rule(*call[:7], call[7] + 99, call[8])


@pytest.mark.parametrize("channels", [1, 16, 70, 600])
@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("starts", [[0, 1], [0, 1, 3, 20, 20, 40], [0, 9]], ids=str)
def test_short_conv(starts: list[int], taps: int, channels: int) -> None:
    torch.manual_seed(channels + taps)
    sequences = len(starts) - 1
    x, weight = torch.randn(starts[-1], channels), torch.randn(channels, 1, taps)
    inputs, slots = torch.randn(sequences + 1, taps - 1, channels), torch.randperm(sequences + 1)
    rest = (torch.tensor(starts).int(), slots[:sequences], torch.arange(sequences) % 3 == 1)
    kept = [inputs.clone(), inputs.clone(), inputs.double()]
    plain = REFERENCE.short_conv(x, weight, rest[0], kept[0], *rest[1:])
    actual = NATIVE.short_conv(x, weight, rest[0], kept[1], *rest[1:])
    exact = REFERENCE.short_conv(x.double(), weight.double(), rest[0], kept[2], *rest[1:])
    assert_as_exact(actual, plain, exact)
    assert torch.equal(kept[0], kept[1])
    assert_as_exact(
        NATIVE.short_conv(x, weight, rest[0]),
        REFERENCE.short_conv(x, weight, rest[0]),
        REFERENCE.short_conv(x.double(), weight.double(), rest[0]),
    )


def test_what_short_conv_does_not_take_goes_to_the_reference() -> None:
    starts = torch.tensor([0, 4, 12]).int()
    x, weight = torch.randn(12, 20), torch.randn(20, 1, 4)
    plain = REFERENCE.short_conv(x, weight, starts)
    learning = weight.clone().requires_grad_()
    NATIVE.short_conv(x, learning, starts).sum().backward()
    assert learning.grad is not None
    assert torch.equal(NATIVE.short_conv(x.t().contiguous().t(), weight, starts), plain)
    assert NATIVE.short_conv(x.bfloat16(), weight, starts).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 2, 16), (1, 0, 5), (3, 1, 33), (9, 8, 700)], ids=str)
def test_residual_mix(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(sum(shape))
    tokens, rows, width = shape
    bank = torch.randn(tokens, rows + 3, width)[:, :rows] * 3
    call = (bank, torch.randn(tokens, width), torch.randn(width), 1e-5)
    actual, plain = NATIVE.residual_mix(*call), REFERENCE.residual_mix(*call)
    assert_as_exact(actual, plain, REFERENCE.residual_mix(*_doubled(call)))
    learning = call[1].clone().requires_grad_()
    NATIVE.residual_mix(call[0], learning, *call[2:]).sum().backward()
    assert learning.grad is not None


@pytest.mark.parametrize("activation", [SILU, Activation(4.0, 25.0), Activation(2.0)])
def test_gated_activation_from_tiny_to_huge(activation: Activation) -> None:
    sizes = 10.0 ** torch.linspace(-8, 4, 1000)
    gate = torch.randn(6, 1000).sign() * sizes
    up = torch.randn(6, 1000) * sizes.flip(0)
    exact = REFERENCE.gated_activation(gate.double(), up.double(), activation)
    actual = NATIVE.gated_activation(gate, up, activation)
    # Below 1e-35 the sigmoid may count as zero.
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-30)
    gate[0, 0] = torch.nan
    assert NATIVE.gated_activation(gate, up, activation)[0, 0].isnan()
