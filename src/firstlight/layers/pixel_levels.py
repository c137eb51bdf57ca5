"""Owns how the levels of pixels become the numbers an image encoder reads; knows no picture.

Shape letters: N patches, C channels, P pixels along a patch.
"""

import torch
from torch import Tensor


def pixel_table() -> Tensor:
    """Returns the number of each of the 256 levels, fp32: (level / 255 - 0.5) / 0.5.

    Made on the CPU, so that every device reads the same numbers.
    """
    levels = torch.arange(256, dtype=torch.float32, device="cpu")
    return (levels / 255.0 - 0.5) / 0.5


def normalise_pixels(levels_NCPP: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of uint8 levels in `dtype`, on their device."""
    table = pixel_table().to(levels_NCPP.device, dtype)
    return table.index_select(0, levels_NCPP.flatten().int()).view(levels_NCPP.shape)
