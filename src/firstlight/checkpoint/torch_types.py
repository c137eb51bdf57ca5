"""Owns how header types, numpy arrays and torch dtypes correspond, and copies between them."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
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


_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SERIAL = 32768  # torch copies fewer values than this on the calling thread


def as_tensor(values: Array, dtype: str) -> torch.Tensor:
    """Returns a tensor over the same memory, its bits read as `dtype`."""
    return torch.from_numpy(values).view(TORCH_TYPES[dtype])


def as_array(tensor: torch.Tensor) -> Array:
    """Returns the memory of a CPU tensor as integers of the same width; strides are kept."""
    array: Array = tensor.detach().view(_SAME_WIDTH[tensor.element_size()]).numpy()
    return array


def copy_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a tensor of any device and dtype, on the calling thread alone.

    torch would start its own pool for a large copy, one a loading thread: they fight for the cores.
    """
    if target.device.type != "cpu":
        target.copy_(values)
    elif target.dtype == values.dtype:
        np.copyto(*_by_runs(as_array(target), as_array(values)))
    elif target.numel() < _SERIAL or not target.dim():
        target.copy_(values)
    elif len(target) > 1:
        step = max(1, (_SERIAL - 1) * len(target) // target.numel())
        for start in range(0, len(target), step):
            copy_values(target[start : start + step], values[start : start + step])
    else:
        copy_values(target[0], values[0])


def _by_runs(target: Array, values: Array) -> tuple[Array, Array]:
    """Returns two arrays of one shape with their last dim as one element, where both allow it.

    numpy then moves a run at a time instead of a value: interleaving is up to six times as fast.
    """
    width = target.itemsize * target.shape[-1] if target.ndim > 1 else 0
    same = target.shape == values.shape and target.itemsize == values.itemsize
    if not same or width <= target.itemsize or not target.size:
        return target, values
    if target.strides[-1] != target.itemsize or values.strides[-1] != values.itemsize:
        return target, values
    return target.view(f"V{width}")[..., 0], values.view(f"V{width}")[..., 0]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor; writing to them writes to the tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
