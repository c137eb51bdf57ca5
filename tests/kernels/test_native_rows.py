"""Tests of the compiled norms, rotation and greedy choice against their references."""

import pytest
import torch

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native

NATIVE = builtin_kernels().resolve(machine_query())
CHOSEN = next(line for line in NATIVE.describe() if line.startswith("rms_norm"))
REFERENCE = reference_kernels()

pytestmark = pytest.mark.skipif(
    "native" not in CHOSEN, reason=f"native kernels: {load_native().reason or CHOSEN}"
)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 33), (5, 576), (200, 576)])
def test_norms(shape: tuple[int, int]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape) * 9, torch.randn(shape[1])
    close = torch.testing.assert_close
    close(NATIVE.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    normed, total = NATIVE.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, NATIVE.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("pairs", [1, 8, 20, 32])
@pytest.mark.parametrize("tokens", [0, 1, 5, 150])
def test_rotary(tokens: int, pairs: int) -> None:
    q, k = torch.randn(tokens, 9, 64), torch.randn(tokens, 5, 64)[:, 1:4]
    angles = torch.rand(50, pairs) * 6
    positions = torch.randint(0, 50, (tokens,))
    ours = NATIVE.rotary(q, k, positions, angles.cos(), angles.sin())
    for actual, expected in zip(
        ours, REFERENCE.rotary(q, k, positions, angles.cos(), angles.sin()), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("position", [-1, 4])
def test_position_outside_the_tables_is_an_error(position: int) -> None:
    x, table = torch.randn(2, 1, 8), torch.rand(4, 4)
    positions = torch.tensor([0, position])
    with pytest.raises(IndexError, match="rotary tables"):
        NATIVE.rotary(x, x, positions, table, table)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (2, 17), (3, 49152)])
def test_greedy(shape: tuple[int, int]) -> None:
    logits = torch.randn(shape) * 6
    ids, log_probabilities = NATIVE.greedy(logits)
    expected_ids, expected = REFERENCE.greedy(logits)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(log_probabilities, expected, rtol=1e-5, atol=5e-6)


def test_greedy_takes_the_first_of_equals_and_shows_nan() -> None:
    logits = torch.zeros(3, 40)
    logits[0, [7, 30]] = 2.0
    logits[1, 33] = torch.nan
    logits[2, 5] = -torch.inf
    ids, log_probabilities = NATIVE.greedy(logits)
    assert ids.tolist() == [7, 33, 0]
    assert log_probabilities.isnan().tolist() == [False, True, False]


def test_gradients_come_from_the_reference() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    NATIVE.rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and weight.grad is not None
