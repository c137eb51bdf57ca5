"""Owns how the tensors of a piece of weights lie in one run of bytes, and views of them there.

Knows shapes and types from the rules; not whose memory the bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.checkpoint.pieces import Piece
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.sharding.residency import image_offsets


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int


class PieceImage:
    """The layout of one piece; `num_bytes` long."""

    def __init__(self, piece: Piece, dtype: torch.dtype) -> None:
        """`dtype` is that of parameters whose rule keeps none of its own."""
        kinds = [
            (t.name, t.shape, TORCH_TYPES[t.rule.dtype] if t.rule.dtype else dtype)
            for t in piece.targets
        ]
        sizes = [prod(shape) * kind.itemsize for _, shape, kind in kinds]
        offsets, self.num_bytes = image_offsets(sizes)
        self._parts = [
            _Part(*kind, offset, size)
            for kind, offset, size in zip(kinds, offsets, sizes, strict=True)
        ]

    @property
    def names(self) -> Sequence[str]:
        """The parameters, by name."""
        return [part.name for part in self._parts]

    @property
    def kinds(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each parameter."""
        return {part.name: (part.shape, part.dtype) for part in self._parts}

    @torch.inference_mode(False)  # threads that compute nothing write to them
    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """Returns the tensors over uint8 [at least num_bytes], by name."""
        return {
            part.name: memory[part.offset : part.offset + part.num_bytes]
            .view(part.dtype)
            .view(part.shape)
            for part in self._parts
        }
