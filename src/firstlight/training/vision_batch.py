"""Owns encoding many pictures of one size at once, with the vision tower's own modules.

It knows no picture. The tower's own forward goes picture by picture, which costs small pictures
more than their arithmetic; the values are the same.

Shape letters: B pictures, N patches of one, D tower width, A heads, H head width, R pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.models.kimi_k3.vision import Grid, _merged, _rotated, patch_rotation


def encode(module: Any, pixels_NCPP: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Returns the features of each picture, as the model's own `encode` does."""
    if len(set(grids)) != 1:
        features: list[Tensor] = module.encode(pixels_NCPP, grids)
        return features
    tower, grid, pictures = module.vision, grids[0], len(grids)
    patches = len(pixels_NCPP) // pictures
    x_XD = tower.patch_embed(pixels_NCPP) + tower._places(grid).repeat(pictures, 1)
    turn_XR = patch_rotation(grid, tower.config).repeat(pictures, 1)
    for block in tower.blocks:
        x_XD = x_XD + block.wo(_attend(block, block.norm0(x_XD), turn_XR, (pictures, patches)))
        inner = functional.gelu(block.fc0(block.norm1(x_XD)), approximate="tanh")
        x_XD = x_XD + block.fc1(inner)
    x_XD = tower.final_norm(x_XD)
    merged = [_merged(part, grid, tower.config.merge) for part in x_XD.split(patches)]
    rows: Tensor = module.projector(torch.cat(merged))
    return list(rows.chunk(pictures))


def _attend(block: Any, x_XD: Tensor, turn_XR: Tensor, size: tuple[int, int]) -> Tensor:
    q, k, v = block.wqkv(x_XD).view(len(x_XD), 3, -1, block.head_dim).unbind(1)
    q, k = _rotated(q, turn_XR), _rotated(k, turn_XR)
    q_BANH, k_BANH, v_BANH = (x.unflatten(0, size).transpose(1, 2) for x in (q, k, v))
    out_BANH = functional.scaled_dot_product_attention(q_BANH, k_BANH, v_BANH)
    return out_BANH.transpose(1, 2).flatten(0, 1).flatten(1)
