"""Owns the names and sizes of element types and codecs; knows neither torch nor how values are
converted.

Type names are those of safetensors headers (F32, BF16, U8 ...). A codec says how many values share
a scale, because a layout may never cut inside such a group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from firstlight.errors import ConfigError

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
        "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
        "I64": 64, "I32": 32, "I16": 16, "I8": 8,
        "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Codec:
    """How the values of a tensor are held. `dtype` is the type they are cast to, empty to keep it.

    A codec with `bits` holds codes and scales instead: `rows` x `columns` of a matrix share one
    scale (0: as many as there are), which takes `scale_bytes`.
    """

    name: str
    dtype: str = ""
    bits: int = 0
    rows: int = 1
    columns: int = 0
    scale_bytes: int = 0

    @property
    def quantised(self) -> bool:
        """Says whether values are held as codes and scales."""
        return self.bits > 0

    def group(self, dim: int) -> int:
        """Returns how many values along a dim of a matrix no cut may separate, 1 if any may.

        A scale of a whole dim is held by every piece, so it binds none.
        """
        return max(1, self.columns if dim else self.rows) if self.quantised else 1

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns rows and columns of scales that a matrix of this shape has."""
        rows, columns = shape
        return (
            math.ceil(rows / self.rows) if self.rows else 1,
            math.ceil(columns / self.columns) if self.columns else 1,
        )

    def code_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of the codes of a matrix."""
        return math.prod(shape) * self.bits // 8

    def matrix_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of codes and scales of a matrix."""
        return self.code_bytes(shape) + math.prod(self.scale_shape(shape)) * self.scale_bytes

    def takes(self, shape: Sequence[int]) -> bool:
        """Says whether a tensor is a matrix whose groups are all full."""
        if len(shape) != 2 or not math.prod(shape):
            return False
        return not any(n % self.group(dim) for dim, n in enumerate(shape))


KEEP = Codec("keep")
CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            KEEP,
            Codec("fp32", "F32"),
            Codec("bf16", "BF16"),
            Codec("fp16", "F16"),
            Codec("int8", bits=8, rows=1, columns=0, scale_bytes=4),
            Codec("int4", bits=4, rows=1, columns=32, scale_bytes=2),
            Codec("fp8", bits=8, rows=0, columns=0, scale_bytes=4),
            Codec("fp8-block", bits=8, rows=128, columns=128, scale_bytes=4),
            Codec("mxfp4", bits=4, rows=1, columns=32, scale_bytes=1),
        )
    }
)


def find_codec(name: str) -> Codec:
    """Returns the codec of that name. Raises ConfigError listing the known ones."""
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(sorted(CODECS))}")
    return CODECS[name]


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element. Raises ConfigError for a type no header may name."""
    if dtype not in DTYPE_BITS:
        raise ConfigError(f"unknown element type {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[dtype] // 8


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Returns the bytes of a dense tensor of that type and shape."""
    return math.prod(shape) * dtype_bytes(dtype)
