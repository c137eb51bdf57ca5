"""Owns what every kind of checkpoint offers its readers; knows no file format.

Values come as numpy arrays. Types numpy lacks (BF16, F8_*) come as unsigned integers of the same
width: the info's `dtype` says what the bits mean.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np

from firstlight.checkpoint.findings import Finding
from firstlight.sharding.codecs import tensor_bytes

RAW_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
        "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
    }
)  # fmt: skip
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})

Array = np.ndarray[Any, np.dtype[Any]]


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a checkpoint: `dtype` and `shape` are those of the values `read` returns.

    `stored` names the form in the file when it is another one (Q4_1 ...), else it equals `dtype`.
    `offset` and `num_bytes` are the run in the file. `in_place` says that this run holds the values
    as they are read, row by row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int
    stored: str
    in_place: bool = True

    @property
    def value_bytes(self) -> int:
        """Bytes of the values as `read` returns them."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def rows(self) -> int:
        """Length of the first dim, 1 for a scalar."""
        return self.shape[0] if self.shape else 1


class Checkpoint(Protocol):
    """A checkpoint as published: tensors by their Hugging Face names, read at file offsets."""

    @property
    def path(self) -> Path:
        """The folder or file."""
        ...

    @property
    def format(self) -> str:
        """`safetensors`, `pytorch`, `torch.distributed` or `gguf`."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, O(1)."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold tensors."""
        ...

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Defects and remarks from the headers alone."""
        ...

    def config(self) -> dict[str, Any]:
        """Returns the model config in the words of a Hugging Face config.json."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Returns a tensor, or a run of its rows, in its logical shape."""
        ...

    def read_into(self, name: str, start_row: int, buffer: memoryview) -> None:
        """Fills a buffer with whole rows from `start_row` on, if the tensor is `in_place`."""
        ...

    def source_digest(self) -> str:
        """Returns a BLAKE3 over file names, sizes and headers: it changes when a tensor moves."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...
