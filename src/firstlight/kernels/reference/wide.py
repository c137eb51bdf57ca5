"""Owns the precision of inner sums: fp32 at least, and whatever is more where the input is."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Returns float64 as it is and everything else as float32."""
    return x if x.dtype == torch.float64 else x.float()
