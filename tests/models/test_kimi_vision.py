"""Pieces of the vision tower that have another form to be compared with."""

import pytest
import torch

from firstlight.models.kimi_k3.vision import patch_rotation, rotate_pairs
from firstlight.models.spec import read_model_spec
from tiny_kimi import miniature_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_turn_as_complex_numbers_do(dtype):
    vision = read_model_spec(miniature_config()).config.vision
    turn_NR2 = patch_rotation((1, 4, 6), vision)
    x_NAH = torch.randn(24, 2, vision.head_dim, generator=torch.Generator().manual_seed(0))
    x_NAH = x_NAH.to(dtype)
    pairs = torch.view_as_complex(x_NAH.float().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.view_as_complex(turn_NR2).unsqueeze(1)).flatten(-2)
    assert turned.std() > 0.9 and not torch.allclose(turned, x_NAH.float(), atol=0.1)
    assert torch.equal(rotate_pairs(x_NAH, turn_NR2), turned.to(dtype))
