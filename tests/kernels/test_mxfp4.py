"""MXFP4 conversion: exact one way, nearest the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstlight.kernels.mxfp4 import GROUP, MAGNITUDES, Mxfp4, from_mxfp4, to_mxfp4


def test_bytes_mean_what_the_format_says() -> None:
    packed = torch.full((1, GROUP // 2), 0x97, dtype=torch.uint8)  # 6, then -0.5
    values = from_mxfp4(Mxfp4(packed, torch.tensor([[128]], dtype=torch.uint8)))
    assert values[0, :4].tolist() == [12.0, -1.0, 12.0, -1.0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_codes_survive_a_round_trip(seed: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 16, (2, groups * GROUP), generator=generator)
    code[:, ::GROUP] = 7  # a group holds its largest magnitude, or its scale is not the smallest
    code = torch.where(code == 8, 0, code)  # minus zero comes back as zero
    packed = (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8)
    scale = torch.randint(40, 200, (2, groups), generator=generator).to(torch.uint8)
    again = to_mxfp4(from_mxfp4(Mxfp4(packed, scale)))
    assert torch.equal(again.packed, packed) and torch.equal(again.scale, scale)


@given(st.integers(0, 2**32 - 1))
def test_the_nearest_value_is_taken(seed: int) -> None:
    values = torch.randn(4, GROUP, generator=torch.Generator().manual_seed(seed))
    matrix = to_mxfp4(values)
    step = torch.ldexp(torch.ones_like(matrix.scale, dtype=torch.float32), matrix.scale.int() - 127)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    choices = table[:, None, None] * step
    best = (choices - values).abs().amin(0)
    assert torch.equal((from_mxfp4(matrix) - values).abs(), best)


def test_zeros_and_ragged_rows() -> None:
    assert torch.equal(from_mxfp4(to_mxfp4(torch.zeros(2, GROUP))), torch.zeros(2, GROUP))
    with pytest.raises(AssertionError, match="groups of 32"):
        to_mxfp4(torch.zeros(2, 33))
