"""Tests of packed modules where torch's own functions meet them."""

import pytest
import torch
from torch import nn

from firstlight.kernels.builtin import reference_kernels
from firstlight.kernels.packed_weight import pack_weight
from firstlight.layers.packed_modules import PackedEmbedding, PackedLinear, PackedMatrix

KERNELS = reference_kernels()


def _matrix(weight: torch.Tensor) -> PackedMatrix:
    return PackedMatrix(pack_weight(weight, KERNELS.pack_weight_as), KERNELS)


WEIGHT = torch.randn(10, 64, generator=torch.Generator().manual_seed(1)).bfloat16().float()


def test_torch_functions_take_it_for_a_weight() -> None:
    matrix, x, ids = _matrix(WEIGHT), torch.randn(3, 64), torch.tensor([[1, 9], [0, 1]])
    bias = torch.randn(10)
    assert matrix.shape == (10, 64)
    for rest in ((), (None,), (bias,)):
        wanted = nn.functional.linear(x, WEIGHT, *rest)
        assert torch.equal(nn.functional.linear(x, matrix, *rest), wanted)
    wanted = nn.functional.embedding(ids, WEIGHT)
    assert torch.equal(nn.functional.embedding(ids, matrix), wanted)


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError):
        torch.add(torch.ones(10, 64), _matrix(WEIGHT))


def test_modules_compute_what_the_plain_ones_do() -> None:
    matrix, x = _matrix(WEIGHT), torch.randn(3, 64)
    plain = nn.Linear(64, 10).requires_grad_(False)
    plain.weight.copy_(WEIGHT)
    assert torch.equal(PackedLinear(matrix, plain.bias)(x), plain(x))
    ids = torch.tensor([4, 0, 9])
    assert torch.equal(PackedEmbedding(matrix)(ids), WEIGHT[ids])
