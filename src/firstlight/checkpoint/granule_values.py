"""Owns what the bytes of granules mean: their values, their place in parameters, their digests.

Reads nothing; how bytes arrive is decided elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from firstlight.checkpoint.codec_values import decode_matrix
from firstlight.checkpoint.digests import Entries
from firstlight.checkpoint.fill_tensors import destination
from firstlight.checkpoint.granule_plan import GranuleRead
from firstlight.checkpoint.read_plan import Target
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    PartPlace,
    PartRecord,
    UnitRecord,
    describe_granule,
)
from firstlight.checkpoint.torch_types import TORCH_TYPES, copy_values
from firstlight.errors import DigestMismatch
from firstlight.sharding.codecs import find_codec

Parameters = Mapping[str, torch.Tensor]


def part_values(rows: torch.Tensor, part: PartRecord, place: PartPlace) -> torch.Tensor:
    """Returns the values [count, *slab] that rows of bytes hold of a part."""
    codec = find_codec(part.codec)
    if codec.quantised:
        slabs = [decode_matrix(codec, row, place.shape) for row in rows.numpy()]
        return torch.from_numpy(np.stack(slabs))
    return rows.view(TORCH_TYPES[part.dtype]).view(len(rows), *(place.shape or (1,)))


def place_values(
    parameters: Parameters,
    read: GranuleRead,
    target: Target,
    *,
    block: BlockRecord,
    values: torch.Tensor,
) -> None:
    """Copies [count, *slab] into the target, slabs side by side along the dim that is cut."""
    tensor = destination(parameters, target)
    if not target.rule.shape:
        copy_values(tensor, values.view(()))
        return
    dim, length = target.part.dim, values.shape[1 + target.part.dim]
    step = block.piece_rows or length
    rows = tensor.narrow(dim, read.at * step, read.granules * length)
    slabs = rows.view(*rows.shape[:dim], read.granules, length, *rows.shape[dim + 1 :])
    copy_values(slabs.movedim(dim, 0), values)


def compare_digest(
    found: bytes,
    entries: Entries,
    entry: int,
    *,
    path: Path,
    unit: UnitRecord,
    key: GranuleKey,
) -> None:
    """Raises DigestMismatch naming file, granule and tensors unless `found` is what is recorded."""
    if found != entries["digest"][entry].tobytes():
        raise DigestMismatch(
            f"{path}: {describe_granule(unit, key)} differs from its recorded digest; the "
            "weights are damaged. `firstlight verify` lists all damage; make the store again"
        )
