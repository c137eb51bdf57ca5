"""Owns the MXFP4 form of a matrix: what its bytes mean, and exact conversion both ways.

Knows no kernel and no module. Two values a byte, the lower half first; one E8M0 scale for each 32
consecutive values of a row (OCP Microscaling Formats 1.0; the packing of compressed-tensors).

Shape letters: E experts (or any leading dims), R rows, C columns, G groups of 32 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halves between neighbours: a magnitude beyond the i-th rounds up to the next one (ties to even).
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_EVEN_ABOVE = (False, True, False, True, False, True, False)
_LARGEST_EXPONENT = 2  # of the element format: 6 = 1.5 * 2^2
_BIAS = 127


class Mxfp4(NamedTuple):
    """Matrices in MXFP4: codes uint8 [..., R, C / 2] and scale exponents uint8 [..., R, C / 32]."""

    packed: Tensor
    scale: Tensor


def from_mxfp4(matrix: Mxfp4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the values [..., R, C], exact in float32 and bfloat16 over the usual scales."""
    codes = torch.stack((matrix.packed & 15, matrix.packed >> 4), -1).flatten(-2)
    table = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), device=codes.device)
    values = _by_group(table[codes.long()])
    ones = torch.ones_like(matrix.scale, dtype=torch.float32)
    scale = torch.ldexp(ones, matrix.scale.int() - _BIAS)
    out: Tensor = (values * scale.unsqueeze(-1)).flatten(-2).to(dtype)
    return out


def to_mxfp4(values: Tensor) -> Mxfp4:
    """Returns the nearest MXFP4 matrices of float values [..., R, C], C a multiple of 32.

    The scale of a group is 2^(floor(log2(largest)) - 2), values beyond 6 are held at 6, ties go to
    the even code, as the format's specification says (section 6.3).
    """
    assert values.shape[-1] % GROUP == 0, f"{values.shape[-1]} columns are no groups of {GROUP}"
    groups = _by_group(values.float())
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(largest > 0, exponent, -_BIAS).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for bound, even_above in zip(_BOUNDS, _EVEN_ABOVE, strict=True):
        beyond = scaled.abs() >= bound if even_above else scaled.abs() > bound
        code += beyond.to(torch.uint8)
    code += (scaled < 0).to(torch.uint8) * 8
    code = code.flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return Mxfp4(packed.contiguous(), (exponent + _BIAS).to(torch.uint8))


def _by_group(values: Tensor) -> Tensor:
    return values.view(*values.shape[:-1], -1, GROUP)
