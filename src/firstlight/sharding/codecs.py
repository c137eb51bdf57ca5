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
    """How the values of a tensor are held: `group` consecutive values along a dim share one
    scale.
    """

    name: str
    dtype: str
    group: int = 1


KEEP = Codec("keep", "")
CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "keep": KEEP,
        "fp32": Codec("fp32", "F32"),
        "bf16": Codec("bf16", "BF16"),
        "fp16": Codec("fp16", "F16"),
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
