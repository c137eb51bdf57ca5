"""Tests of the compiled linear kernels against their references and against fp64."""

import pytest
import torch

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native
from firstlight.kernels.registry import KernelSet

pytestmark = pytest.mark.skipif(
    load_native().module is None, reason=f"native kernels: {load_native().reason}"
)

REFERENCE = reference_kernels()
NAMES = ("native_tiles", "native_vectors")
SHAPES = [
    (rows, inputs, outputs)
    for rows in (0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 48, 70)
    for inputs, outputs in ((1, 1), (16, 3), (33, 17), (64, 64), (100, 70), (576, 200))
] + [(530, 96, 130), (40, 2100, 50), (5, 2100, 50), (12, 4500, 37)]


@pytest.fixture(params=NAMES)
def native(request: pytest.FixtureRequest) -> KernelSet:
    """Return the kernels of one instruction set, if this machine has it."""
    registry, query = builtin_kernels(), machine_query()
    for kernel in registry.of("linear"):
        reason = kernel.needs.reason_against(query)
        if kernel.name == request.param and reason is not None:
            pytest.skip(reason)
    kept = tuple(k for k in registry.kernels if k.name in (request.param, "reference"))
    kernels = type(registry)(kept).resolve(query)
    assert f"linear: {request.param}" in kernels.describe()
    return kernels


def _case(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 7919 + inputs * 31 + outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def _exact(x: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the fp64 result and the error allowed, four fp32 roundings of the magnitudes summed.

    Measured at most 1.4e-7 with tiles and 3e-7 for MKL.
    """
    exact = x.double() @ weight.double().T + rest
    return exact, 4.8e-7 * (x.double().abs() @ weight.double().abs().T + rest.abs()) + 1e-30


def _close(actual: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> None:
    assert actual.dtype == torch.float32 and actual.shape == exact.shape
    assert ((actual - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_operations(native: KernelSet, shape: tuple[int, int, int]) -> None:
    x, weight, up, bias, residual = _case(*shape)
    nothing = torch.zeros(1)
    _close(native.linear(x, weight), *_exact(x, weight, nothing))
    _close(native.linear(x, weight, bias), *_exact(x, weight, bias))
    _close(native.linear_add(x, weight, None, residual), *_exact(x, weight, residual))
    first, second = native.linear_group(x, (weight, up[:3].contiguous()), (bias, None))
    assert torch.equal(first, native.linear(x, weight, bias))
    assert torch.equal(second, native.linear(x, up[:3].contiguous()))
    gate, gate_allowed = _exact(x, weight, bias)
    right, right_allowed = _exact(x, up, nothing)
    gated = torch.nn.functional.silu(gate) * right
    allowed = 1.2 * (gate_allowed * right.abs() + gate.abs() * right_allowed) + 6e-7 * gated.abs()
    _close(native.gated_mlp_in(x, weight, up, bias, None), gated, allowed + 1e-30)


def test_rows_do_not_depend_on_their_batch(native: KernelSet) -> None:
    tiles = "linear: native_tiles" in native.describe()
    most, fewer = (100, (9, 16, 17, 40, 63)) if tiles else (32, (1, 4, 9, 31))
    x, weight, *_ = _case(most, 576, 200)
    whole = native.linear(x, weight)
    for rows in fewer:
        assert torch.equal(native.linear(x[:rows], weight), whole[:rows])
    few = native.linear(x[:8], weight)
    for rows in range(1, 8):
        assert torch.equal(native.linear(x[:rows], weight), few[:rows])


@pytest.mark.parametrize("rows", [3, 20, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_number_stays_no_number(native: KernelSet, rows: int, bad: float) -> None:
    x, weight, *_ = _case(rows, 40, 33)
    x[1, 35] = bad
    out = native.linear(x, weight)
    assert not out[1].isfinite().any() and out[0].isfinite().all() and out[2:].isfinite().all()
    weight[32, 0] = bad
    out = native.linear(x[:1], weight) if rows < 9 else native.linear(x[2:], weight)
    assert not out[:, 32].isfinite().any() and out[:, :32].isfinite().all()


def _relative_error(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    return float(((out - exact) / scale).pow(2).mean().sqrt())


@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "cancelling", "constant"])
@pytest.mark.parametrize("rows", [5, 16, 64])
def test_error_is_that_of_fp32(native: KernelSet, kind: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(7)
    inputs = 4096 if kind == "positive" else 576
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, 128))
    if kind == "positive":
        x, weight = x.abs(), weight.abs()
    elif kind == "wide":
        x, weight = (
            t * torch.exp2(torch.randn(t.shape, generator=generator) * 12) for t in (x, weight)
        )
    elif kind == "cancelling":
        x[:, 288:], weight[:, 288:] = -x[:, :288], weight[:, :288] * (1 + 1e-6)
    elif kind == "constant":
        x, weight = (t[:, :1].abs().expand(-1, inputs).contiguous() for t in (x, weight))
    ours = _relative_error(native.linear(x, weight), x, weight)
    theirs = _relative_error(torch.nn.functional.linear(x, weight), x, weight)
    assert ours <= max(2 * theirs, 6e-8)


def test_calls_that_are_not_taken_go_to_the_reference(native: KernelSet) -> None:
    x, weight, *_ = _case(4, 24, 8)
    wanted = weight.clone().requires_grad_()
    native.linear(x, wanted).sum().backward()
    assert wanted.grad is not None
    assert native.linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    strided = native.linear(x, weight.T.contiguous().T)
    torch.testing.assert_close(strided, REFERENCE.linear(x, weight))
    with pytest.raises(RuntimeError):
        native.linear(x, weight[:, :20].contiguous())
