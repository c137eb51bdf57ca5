"""Owns a checkpoint with quantised matrices seen as plain ones: codes times scales, when read.

Values come in the type the config gives unquantised weights. A code without its scale is an error,
never a scale of one.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from firstlight.checkpoint.codec_values import float32_to, scale_values, scaled, values_of_codes
from firstlight.checkpoint.findings import ERROR, NOTE, Finding
from firstlight.checkpoint.names import WeightSpec
from firstlight.checkpoint.tensor_info import FLOAT_TYPES, Array, Checkpoint, TensorInfo
from firstlight.sharding.codecs import find_codec
from firstlight.sharding.published_codecs import FIELD, PublishedCodec, published_codec

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_CODE_TYPES = {"int8": ("I8", "I32"), "int4": ("I32",), "fp8": ("F8_E4M3",), "mxfp4": ("U8",)}
# What belongs to a quantised matrix and says nothing of its values.
_ASIDE = (".weight_shape", ".input_scale", ".weight_g_idx")
_ZERO_POINT = ".weight_zero_point"


class _Matrix(NamedTuple):
    """Codes and scales of one matrix; `block` is rows and columns that share a scale."""

    codes: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]


def dequantised(checkpoint: Checkpoint, spec: WeightSpec) -> Checkpoint:
    """Returns the checkpoint with plain matrices where its config says they are quantised; as it is
    when nothing is, or when the family's rules read the codes themselves.

    Raises ConfigError for a quantisation that is not read.
    """
    method = published_codec(checkpoint.config())
    if method is None or any(rule.dtype == "U8" for rule in spec.tensors):
        return checkpoint
    return DequantisedCheckpoint(checkpoint, method)


class DequantisedCheckpoint:
    """The view. Matrices that are not quantised, and all other tensors, are those of the source."""

    def __init__(self, source: Checkpoint, method: PublishedCodec) -> None:
        self._source, self._method = source, method
        self._codec = find_codec(method.codec)
        config = source.config()
        stated = config.get("dtype") or config.get("torch_dtype")
        self._dtype = _TYPES.get(str(stated).removeprefix("torch."), "BF16")
        self._matrices: dict[str, _Matrix] = {}
        self.path: Path = source.path
        self.format = source.format
        self.files = source.files
        found = list(source.findings)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(self._view(found)))
        self.findings = tuple(found)

    def _view(self, found: list[Finding]) -> Iterator[tuple[str, TensorInfo]]:
        aside: set[str] = set()
        for name, info in self._source.tensors.items():
            base = name.removesuffix(self._method.codes)
            if base != name and info.dtype in _CODE_TYPES[self._method.codec]:
                yield from self._matrix(base, info, aside, found)
                aside.add(name)
        for name, info in self._source.tensors.items():
            if name not in aside:
                yield name, info

    def _matrix(
        self, base: str, codes: TensorInfo, aside: set[str], found: list[Finding]
    ) -> Iterator[tuple[str, TensorInfo]]:
        tensors, where = self._source.tensors, f"{codes.file}, {codes.name}"
        names = [base + suffix for suffix in self._method.scales if base + suffix in tensors]
        if base + _ZERO_POINT in tensors:
            found.append(Finding(ERROR, where, "has zero points, which are not read"))
            return
        if len(names) != 1:
            what = f"holds codes, and {len(names)} tensors could be its scales"
            found.append(Finding(ERROR, where, what, f"wanted: one of {base}.weight_scale*"))
            return
        aside.update(names, (base + suffix for suffix in _ASIDE))
        if base + ".input_scale" in tensors:
            what = "not used: activations are not quantised"
            found.append(Finding(NOTE, f"{codes.file}, {base}.input_scale", what))
        shape, scales = self._shape(codes), tensors[names[0]]
        block = _block(shape, scales, self._method)
        if block is None:
            what = f"scales {list(scales.shape)} {scales.dtype} do not fit values {list(shape)}"
            found.append(Finding(ERROR, where, what))
            return
        name = base + ".weight"
        self._matrices[name] = _Matrix(codes, scales, block)
        rows, columns = (
            str(n) if n < whole else "all" for n, whole in zip(block, shape, strict=True)
        )
        yield (
            name,
            msgspec.structs.replace(
                codes,
                name=name,
                dtype=self._dtype,
                shape=shape,
                num_bytes=codes.num_bytes + scales.num_bytes,
                stored=f"{self._method.codec}, {rows} x {columns} values a scale",
                in_place=False,
            ),
        )

    def _shape(self, codes: TensorInfo) -> tuple[int, ...]:
        """Returns the shape of the values that codes stand for."""
        row_bytes = codes.num_bytes // max(1, codes.rows)
        return codes.rows, row_bytes * 8 // self._codec.bits

    def config(self) -> dict[str, Any]:
        """Returns the model config, which no longer speaks of quantised weights."""
        return {name: value for name, value in self._source.config().items() if name != FIELD}

    def read(self, name: str, rows: slice | None = None) -> Array:
        """Returns a tensor, or the rows [start, stop) of it, as a new array."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.read(name, rows)
        info = self.tensors[name]
        start, stop, _ = (rows or slice(None)).indices(info.rows)
        codes = self._source.read(matrix.codes.name, slice(start, stop))
        raw = codes.reshape(stop - start, -1).view(np.uint8)
        if self._method.excess:
            raw = raw ^ np.uint8(128)
        step = matrix.block[0]
        grid = self._scales(matrix, slice(start // step, -(-stop // step)))
        values = values_of_codes(self._codec, raw)
        return float32_to(scaled(values, grid, matrix.block, start % step), self._dtype)

    def _scales(self, matrix: _Matrix, groups: slice) -> Array:
        """Returns the scales of a run of groups of rows as float32, a row for each group."""
        raw, dtype = self._source.read(matrix.scales.name, groups), matrix.scales.dtype
        if dtype == "BF16":
            raw = (raw.astype("<u4") << 16).view("<f4")
        return scale_values(raw).reshape(groups.stop - groups.start, -1)

    def read_into(self, name: str, start_row: int, buffer: memoryview) -> None:
        """Fills a buffer with rows of a tensor that is as it is in its file."""
        self._source.read_into(name, start_row, buffer)

    def source_digest(self) -> str:
        """Returns the digest of the source."""
        return self._source.source_digest()

    def close(self) -> None:
        """Closes the files."""
        self._source.close()


def _block(
    shape: tuple[int, ...], scales: TensorInfo, method: PublishedCodec
) -> tuple[int, int] | None:
    """Returns how many rows and columns share a scale, None when the shapes do not fit."""
    wanted = {"mxfp4": {"U8", "F8_E8M0"}}.get(method.codec, FLOAT_TYPES)
    if scales.dtype not in wanted or not prod(shape):
        return None
    have = scales.shape
    if prod(have) == 1:
        return shape[0], shape[1]
    if have == (shape[0],):
        have = (shape[0], 1)
    if len(have) != 2:
        return None
    block = method.block or (-(-shape[0] // have[0]), -(-shape[1] // have[1]))
    if have == (shape[0], 1):
        block = (1, shape[1])
    fits = have == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return block if fits else None
