"""Owns how a tensor passes from a checkpoint into granules of a store, a tile at a time.

Knows one part of one block; which parts there are, and in which order, is decided elsewhere.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from firstlight.adapt.quantise import encode_granules
from firstlight.checkpoint.codec_values import decode_matrix
from firstlight.checkpoint.store_layout import BlockRecord, PartRecord
from firstlight.checkpoint.tensor_info import Array, Checkpoint
from firstlight.checkpoint.torch_types import TORCH_TYPES, as_array, as_tensor, bytes_of
from firstlight.errors import TensorError
from firstlight.sharding.codecs import dtype_bytes, find_codec

# Stays in a processor's cache; from 4 MiB on numpy asks for huge pages, which are slow to come by.
TILE_BYTES = 3 * 2**20
_ROW_STEP = 8  # rows of a tile inside a granule: keeps every tile a multiple of 8 bytes


_BYTES_TO_CODE = 24  # of a value while its matrix is coded, most of them float32


class Tile(NamedTuple):
    """Rows [start, stop) of a part: they fill `granules` granules from `granule` on, in each of
    them from `first_byte` of the part."""

    start: int
    stop: int
    granule: int
    granules: int
    first_byte: int


def tiles_of(block: BlockRecord, part: PartRecord, tile_bytes: int = TILE_BYTES) -> Iterator[Tile]:
    """Yields tiles of at most `tile_bytes` (or 8 rows) of a part: every row once, in order."""
    rows = part.shape[0] if part.shape else 1
    if find_codec(part.codec).quantised:  # scales follow from the whole matrix
        yield Tile(0, rows, 0, block.granules, 0)
        return
    row_bytes = max(1, prod(part.shape[1:]) * dtype_bytes(part.dtype))
    if part.dim:
        step = max(_ROW_STEP, tile_bytes // row_bytes // _ROW_STEP * _ROW_STEP)
        for start in range(0, rows, step):
            first_byte = start * row_bytes // block.granules
            yield Tile(start, min(rows, start + step), 0, block.granules, first_byte)
        return
    per_granule = block.piece_rows or rows // block.granules
    if per_granule * row_bytes > tile_bytes:
        yield from _inside_granules(rows, per_granule, row_bytes, tile_bytes)
        return
    whole = rows // per_granule
    step = max(1, tile_bytes // max(1, per_granule * row_bytes))
    for granule in range(0, whole, step):
        count = min(step, whole - granule)
        yield Tile(granule * per_granule, (granule + count) * per_granule, granule, count, 0)
    if whole * per_granule < rows:
        yield Tile(whole * per_granule, rows, whole, 1, 0)


def _inside_granules(
    rows: int, per_granule: int, row_bytes: int, tile_bytes: int
) -> Iterator[Tile]:
    step = max(_ROW_STEP, tile_bytes // row_bytes // _ROW_STEP * _ROW_STEP)
    for granule, first in enumerate(range(0, rows, per_granule)):
        end = min(rows, first + per_granule)
        for start in range(first, end, step):
            yield Tile(start, min(end, start + step), granule, 1, (start - first) * row_bytes)


def work_bytes(part: PartRecord, tile: Tile) -> int:
    """Returns about how much memory a tile takes on its way: read, cut, summed, or coded."""
    values = (tile.stop - tile.start) * prod(part.shape[1:])
    if find_codec(part.codec).quantised:
        return values * _BYTES_TO_CODE
    return values * 4 * max(dtype_bytes(part.dtype), dtype_bytes(part.source_dtype))


def read_tile(
    checkpoint: Checkpoint,
    part: PartRecord,
    tile: Tile,
    *,
    source: str,
    on_bytes: Callable[[memoryview], object],
) -> torch.Tensor:
    """Returns the rows of a tile in the element type of the store; `on_bytes` sees them as read.

    Raises TensorError when the cast makes a finite value infinite.
    """
    first = part.source_rows[0] if part.source_rows else 0
    rows = slice(first + tile.start, first + tile.stop)
    values = as_tensor(checkpoint.read(source, rows), part.source_dtype)
    values = values.view(tile.stop - tile.start, *part.shape[1:])
    on_bytes(bytes_of(values))
    if part.dtype == part.source_dtype:
        return values
    cast = values.to(TORCH_TYPES[part.dtype])
    if bool((cast.isinf() & values.isfinite()).any()):
        largest = float(values[values.isfinite()].abs().max())
        raise TensorError(
            f"{source}: values up to {largest:.4g} do not fit {part.dtype}; use bf16, fp32 or keep"
        )
    return cast


def granule_rows(block: BlockRecord, part: PartRecord, tile: Tile, values: torch.Tensor) -> Array:
    """Returns a tile as bytes [granules, num_bytes]: what each granule gets of it.

    Raises TensorError naming the tensor when its values cannot be quantised.
    """
    if find_codec(part.codec).quantised:
        try:
            return encode_granules(block, part, values)
        except TensorError as error:
            raise TensorError(f"{part.name}: {error}") from error
    pieces = as_array(values)
    if part.dim:
        shape = values.shape
        length = shape[part.dim] // block.granules
        cut = (*shape[: part.dim], block.granules, length, *shape[part.dim + 1 :])
        pieces = np.moveaxis(pieces.reshape(cut), part.dim, 0)
    flat: Array = np.ascontiguousarray(pieces).reshape(-1).view(np.uint8)
    return flat.reshape(tile.granules, -1)


def stored_values(block: BlockRecord, part: PartRecord, rows: Array) -> torch.Tensor:
    """Returns what a store will give back for a quantised matrix, from its granules' bytes."""
    codec = find_codec(part.codec)
    shape = list(part.shape)
    shape[part.dim] //= block.granules
    slabs = [decode_matrix(codec, row, tuple(shape)) for row in rows]
    return torch.from_numpy(np.concatenate(slabs, axis=part.dim))
