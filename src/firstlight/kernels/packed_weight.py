"""Owns what a losslessly packed weight is, and the handles of modules made of packed weights.

It refuses to know how packed numbers are multiplied. Native code reads the tuples by position.

Formats, smallest first; every fp32 value comes back bit for bit, or the next format is taken:
affine4   20 bytes for 32 channels: 4-bit q, fp16 d and m; the value is d * q + m
scaled8   34 bytes for 32 channels: signed bytes q, fp16 d; the value is d * q
bfloat16  2 bytes a channel: the lower halves of all values are zero
float32   the tensor itself

Shape letters: N rows, K columns, H head channels, P positions, R rotated channel pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

BLOCK = 32
FORMATS = ("affine4", "scaled8", "bfloat16")


class PackedWeight(NamedTuple):
    """A weight [rows, columns]. `data` is uint8 [rows, row_bytes], or the weight for float32.

    A row of affine4 holds d[K / 32], m[K / 32] and 16 bytes for each block, where byte i keeps
    channel i below and channel i + 16 above; a row of scaled8 holds d[K / 32] and the q.
    """

    format: str
    rows: int
    columns: int
    data: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed data."""
        return self.data.numel() * self.data.element_size()


class PackedMlp(NamedTuple):
    """The weights of a gated feed-forward."""

    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    gate_bias_N: Tensor | None = None
    up_bias_N: Tensor | None = None
    down_bias_N: Tensor | None = None


class PackedAttention(NamedTuple):
    """The weights and options of grouped-query attention over a paged cache.

    Without `q_norm_H` and `k_norm_H` nothing is normalised, without `cos_PR` nothing is rotated.
    """

    q: PackedWeight
    k: PackedWeight
    v: PackedWeight
    o: PackedWeight
    q_bias_N: Tensor | None
    k_bias_N: Tensor | None
    v_bias_N: Tensor | None
    o_bias_N: Tensor | None
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    norm_epsilon: float
    head_dim: int
    scale: float
    window: int | None
    cos_PR: Tensor | None
    sin_PR: Tensor | None


def pack_weight(
    weight_NK: Tensor, pack_weight_as: Callable[[Tensor, str], Tensor | None]
) -> PackedWeight:
    """Return the fp32 weight in the smallest format that keeps every bit.

    `pack_weight_as` is the kernel of that name. A float32 result shares memory with the weight.
    """
    rows, columns = weight_NK.shape
    for name in FORMATS:
        data = pack_weight_as(weight_NK, name)
        if data is not None:
            return PackedWeight(name, rows, columns, data)
    return PackedWeight("float32", rows, columns, weight_NK)
