"""Fixtures of kernel tests: weights that one packed format keeps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def _scales(generator: torch.Generator, rows: int, blocks: int) -> Tensor:
    values = torch.rand(rows, blocks, 1, generator=generator) + 0.01
    return values.half().float()


def make_weight(name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a random fp32 weight whose smallest lossless format is `name`."""
    generator = torch.Generator().manual_seed(seed + rows * 31 + columns)
    values = torch.randn(rows, columns, generator=generator)
    if name == "float32":
        return values
    if name == "bfloat16":
        return values.bfloat16().float()
    size, bound = (rows, columns // 32, 32), 16 if name == "affine4" else 128
    q = torch.randint(0 if name == "affine4" else -127, bound, size, generator=generator).float()
    q[..., 0], q[..., 31] = q.new_tensor(0.0), q.new_tensor(bound - 1.0)
    scaled = q * _scales(generator, rows, columns // 32)
    if name == "affine4":
        offsets = torch.randn(rows, columns // 32, 1, generator=generator)
        scaled += offsets.half().float()
    return scaled.view(rows, columns)


@pytest.fixture
def weight_of() -> Callable[..., Tensor]:
    """Return the maker of weights of a format."""
    return make_weight
