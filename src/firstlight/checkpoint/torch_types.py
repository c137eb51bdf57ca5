"""Owns how header type names, numpy arrays and torch dtypes correspond; converts no values."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from firstlight.checkpoint.tensor_info import Array

TORCH_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)  # fmt: skip


def as_tensor(values: Array, dtype: str) -> torch.Tensor:
    """Returns a tensor over the same memory, its bits read as `dtype`."""
    return torch.from_numpy(values).view(TORCH_TYPES[dtype])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor; writing to them writes to the tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
