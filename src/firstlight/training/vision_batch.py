"""Owns encoding many pictures of one size at once, where the model's own `encode` goes picture by
picture. It knows no picture; the values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firstlight.models.kimi_k3.vision import Grid


def encode(module: Any, pixels_NCPP: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Returns the features of each picture, as the model's own `encode` does."""
    if len(set(grids)) != 1:
        features: list[Tensor] = module.encode(pixels_NCPP, grids)
        return features
    merged = module.vision.alike(pixels_NCPP, grids[0], len(grids))
    rows: Tensor = module.projector(torch.cat(merged))
    return list(rows.chunk(len(grids)))
