"""Owns what codes and scales of a matrix mean: from bytes to float32; knows no file and no torch.

A coded matrix is its codes, row by row, then its scales, row by row. Codes: int8 and int4 count
steps of a float scale (int4: the step plus 8, two a byte, the lower half first); fp8 is E4M3
without infinities; mxfp4 is E2M1, two a byte, with scales that are powers of two (OCP Microscaling
Formats 1.0).
"""

from functools import cache

import numpy as np

from firstlight.checkpoint.tensor_info import Array
from firstlight.sharding.codecs import Codec

INT4_ZERO = 8
_SCALES = {1: "u1", 2: "<f2", 4: "<f4"}
_E8M0_BIAS = 127


def decode_matrix(codec: Codec, raw: Array, shape: tuple[int, ...]) -> Array:
    """Returns the values, float32 [rows, columns], of a coded matrix of that shape; `raw` is its
    `codec.matrix_bytes(shape)` bytes."""
    count = codec.code_bytes(shape)
    codes = raw[:count].reshape(shape[0], -1)
    scales = raw[count : codec.matrix_bytes(shape)].view(np.dtype(_SCALES[codec.scale_bytes]))
    grid = scale_values(scales).reshape(codec.scale_shape(shape))
    block = (codec.rows or shape[0], codec.columns or shape[1])
    return scaled(values_of_codes(codec, codes), grid, block)


def values_of_codes(codec: Codec, codes: Array) -> Array:
    """Returns what codes [rows, bytes] count, before scales, as float32 [rows, columns]."""
    if codec.name == "int8":
        return codes.view(np.int8).astype(np.float32)
    if codec.bits == 8:
        return np.take(e4m3_values(), codes)
    table = mxfp4_values() if codec.name == "mxfp4" else int4_values()
    pairs = np.stack((table[codes & 15], table[codes >> 4]), -1)
    values: Array = pairs.reshape(codes.shape[0], -1)
    return values


def scale_values(scales: Array) -> Array:
    """Returns scales as float32; bytes are exponents of two."""
    if scales.dtype != np.uint8:
        return scales.astype(np.float32)
    powers: Array = np.ldexp(np.float32(1), scales.astype(np.int32) - _E8M0_BIAS)
    return powers.astype(np.float32)


def scaled(values: Array, grid: Array, block: tuple[int, int], skipped: int = 0) -> Array:
    """Multiplies float32 values [R, C], in place, with the scale of their group, and returns them.

    `block` is rows and columns that share a scale, `grid` [r, c] the scales of the groups that the
    rows touch, of whose first `skipped` rows are not among them; the last may be short.
    """
    step, width = block
    if grid.shape[1] > 1 and width > 1:
        grid = np.repeat(grid, width, axis=1)[:, : values.shape[1]]
    if step == 1:
        values *= grid
        return values
    for number, scales in enumerate(grid):
        start = number * step - skipped
        values[max(0, start) : start + step] *= scales
    return values


@cache
def e4m3_values() -> Array:
    """Returns the value of each of the 256 codes of E4M3 (no infinities, 0x7f and 0xff are NaN)."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, (codes & 7) / 8
    normal = np.ldexp(1 + fraction, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(fraction, -6), normal)
    values[(codes & 127) == 127] = np.nan
    signed: Array = np.where(codes & 128, -values, values).astype(np.float32)
    return signed


@cache
def mxfp4_values() -> Array:
    """Returns the value of each of the 16 codes of E2M1."""
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    return np.concatenate((half, -half))


@cache
def int4_values() -> Array:
    """Returns the value of each of the 16 codes of int4."""
    steps: Array = np.arange(16, dtype=np.float32) - INT4_ZERO
    return steps


def float32_to(values: Array, dtype: str) -> Array:
    """Returns float32 values as the raw form of a float type, rounded to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype != "BF16":
        return values.astype({"F16": "<f2", "F64": "<f8"}[dtype])
    bits = np.ascontiguousarray(values).view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
