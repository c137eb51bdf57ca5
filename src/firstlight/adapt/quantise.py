"""Owns how a matrix becomes codes and scales, cut into granules; what they mean is checkpoint's.

Scales are absolute maxima of their group over the largest code; a group of zeros has scale one.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from firstlight.checkpoint.codec_values import INT4_ZERO
from firstlight.checkpoint.store_layout import BlockRecord, PartRecord
from firstlight.checkpoint.tensor_info import Array
from firstlight.errors import TensorError
from firstlight.kernels.mxfp4 import to_mxfp4
from firstlight.sharding.codecs import Codec, find_codec

_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp8-block": 448.0}


class Coded(NamedTuple):
    """A matrix as codes uint8 [R, bytes] and scales [r, c] in the type they are stored in."""

    codes: Tensor
    scales: Tensor


def encode(codec: Codec, values: Tensor) -> Coded:
    """Returns the nearest coded matrix of float values [R, C], whose groups must be full.

    Raises TensorError for values that are not finite.
    """
    values = values.float()
    if not bool(values.isfinite().all()):
        raise TensorError("values that are not finite cannot be quantised; use keep")
    if codec.name == "mxfp4":
        matrix = to_mxfp4(values)
        return Coded(matrix.packed, matrix.scale)
    rows, columns = codec.rows or values.shape[0], codec.columns or values.shape[1]
    groups = values.view(values.shape[0] // rows, rows, values.shape[1] // columns, columns)
    scales = groups.abs().amax((1, 3)) / _LARGEST[codec.name]
    if codec.scale_bytes == 2:
        scales = scales.half()
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    steps = (groups / scales.float()[:, None, :, None]).view(values.shape)
    return Coded(_CODES[codec.name](steps), scales)


def _int8_codes(steps: Tensor) -> Tensor:
    return steps.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)


def _int4_codes(steps: Tensor) -> Tensor:
    codes = (steps.round().clamp(-7, 7) + INT4_ZERO).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _fp8_codes(steps: Tensor) -> Tensor:
    return steps.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


_CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": _int8_codes,
    "int4": _int4_codes,
    "fp8": _fp8_codes,
    "fp8-block": _fp8_codes,
}


def encode_granules(block: BlockRecord, part: PartRecord, values: Tensor) -> Array:
    """Returns a whole matrix as bytes [granules, num_bytes]: codes and scales of each granule."""
    codec = find_codec(part.codec)
    coded = encode(codec, values)
    own = codec.rows if part.dim == 0 else codec.columns
    codes = _pieces(coded.codes, block.granules, part.dim)
    scales = coded.scales.contiguous().view(torch.uint8)
    cut = block.granules if own else 1  # a scale of the whole dim goes to every granule
    spread = np.broadcast_to(_pieces(scales, cut, part.dim), (block.granules, _per(scales, cut)))
    return np.concatenate((codes, spread), axis=1)


def _per(values: Tensor, granules: int) -> int:
    return values.numel() // granules


def _pieces(values: Tensor, granules: int, dim: int) -> Array:
    """Cuts bytes [R, n] along a dim; returns [granules, bytes]."""
    cut = torch.stack(values.chunk(granules, dim)) if granules > 1 else values.unsqueeze(0)
    pieces: Array = cut.reshape(granules, -1).numpy()
    return pieces
