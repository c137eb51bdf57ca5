"""Owns the plain PyTorch form of attention over earlier residual sums of the same token.

Shape letters: T tokens, B rows of the bank, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.reference.wide import wide


def residual_mix(bank_TBD: Tensor, current_TD: Tensor, query_D: Tensor, epsilon: float) -> Tensor:
    """Returns sum_i softmax_i(<v_i / rms(v_i), query>) v_i over the bank and the current row.

    Scores and sum are in fp32; the rows are summed as they are, only the keys are normalised.
    """
    rows_TBD = wide(torch.cat((bank_TBD, current_TD.unsqueeze(1)), 1))
    keys_TBD = rows_TBD * torch.rsqrt(rows_TBD.square().mean(-1, keepdim=True) + epsilon)
    shares_TB = torch.softmax(keys_TBD @ wide(query_D), -1)
    return torch.einsum("tb,tbd->td", shares_TB, rows_TBD).to(current_TD.dtype)
