"""Owns what weights take once they are packed without loss (decision 0008), from their stored type.

Knows neither values nor kernels: a type says in how many bytes its values can be given back.
"""

from __future__ import annotations

from collections.abc import Mapping

from firstlight.planning.weights import WeightClass, WeightTable
from firstlight.sharding.layout import Layout

# Bytes of 32 values that a stored type allows, of the formats of `kernels/packed_weight.py`.
BLOCK_BYTES: Mapping[str, int] = {"Q4_0": 20, "Q4_1": 20, "Q8_0": 34, "BF16": 64}
_PLAIN = 128
_BLOCK = 32
# Matrices that modules use themselves, outside the linear modules that are packed.
_KEPT = ("router.weight", "kv_b_proj.weight")


def packed_bytes(
    table: WeightTable, layout: Layout, stored: Mapping[str, int]
) -> dict[int, int] | None:
    """Returns the bytes of packed weights by pipeline stage; `stored` counts tensors by type.

    Matrices of fp32 are packed, each after the type it came from. Embedding and head have the type
    with most bits where there are several, as quantisers choose. None when the counts do not tell.
    """
    narrow = sorted((t for t in stored if t in BLOCK_BYTES), key=lambda t: BLOCK_BYTES[t])
    matrices = sum(one.num_tensors for one in table.classes if is_packed(one))
    if not narrow or sum(stored[t] for t in narrow) < matrices:
        return None
    if len(narrow) > 1 and (len(narrow) > 2 or stored[narrow[-1]] > 2):
        return None
    sizes: dict[int, int] = {}
    local = table.local_bytes(layout)
    for stage in range(layout.pp):
        counts = table.stage_counts(layout.pp, stage)
        sizes[stage] = sum(
            _priced(table, index, size, narrow) * count
            for index, (size, count) in enumerate(zip(local, counts, strict=True))
        )
    return sizes


def is_packed(one: WeightClass) -> bool:
    """Whether a tensor is a matrix of a module that has a packed form."""
    tensor = one.tensor
    is_matrix = len(tensor.shape) == 2 and min(tensor.shape) > 1
    is_plain = tensor.name.endswith(".weight") and not tensor.name.endswith(_KEPT)
    return is_matrix and is_plain and not tensor.dtype and not tensor.unused


def _priced(table: WeightTable, index: int, size: int, narrow: list[str]) -> int:
    one = table.classes[index]
    tensor = one.tensor
    if not size or not is_packed(one):
        return size
    columns = tensor.shape[1]
    if tensor.dim == 1:
        columns = columns * size // table.whole_bytes(one)
    if columns % _BLOCK:
        return size
    kind = narrow[-1] if one.part in ("embed", "head") else narrow[0]
    return size * BLOCK_BYTES[kind] // _PLAIN
