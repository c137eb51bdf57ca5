"""Owns the plain PyTorch form of routed experts, dense and in MXFP4, and of gated activations.

It knows no router and no rank: who holds which experts is told by the number of the first one.

Shape letters: T tokens, K chosen experts a token, E experts in memory, N experts numbered, L input
width, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.activation import Activation
from firstlight.kernels.mxfp4 import Mxfp4, from_mxfp4
from firstlight.kernels.reference.wide import wide


def gated_activation(gate_TF: Tensor, up_TF: Tensor, activation: Activation) -> Tensor:
    """Returns what joins gate and up, computed in fp32, in the inputs' dtype."""
    if activation.beta is None:
        return (functional.silu(wide(gate_TF)) * wide(up_TF)).to(gate_TF.dtype)
    gate, up = wide(gate_TF), wide(up_TF)
    bent = activation.beta * torch.tanh(gate / activation.beta) * torch.sigmoid(gate)
    if activation.linear_beta is not None:
        up = activation.linear_beta * torch.tanh(up / activation.linear_beta)
    return (bent * up).to(gate_TF.dtype)


def experts(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EFL: Tensor,
    w3_EFL: Tensor,
    w2_ELF: Tensor,
    first: int,
    activation: Activation,
    slots_N: Tensor | None = None,
    total_TL: Tensor | None = None,
) -> Tensor:
    """Returns, for each token, the weighted sum of w2 act(w1 x, w3 x) over its chosen experts.

    Experts outside [first, first + E) add nothing: another rank has them. With `slots_N` (int64)
    the matrices of expert first + n stand at `slots_N[n]`, and those of a negative one nowhere.
    Experts are added in the order of their numbers, to `total_TL` (in the wide dtype, which the
    result then has too) where it is given: so a sum may be made in parts and stays the same.
    """

    def matrices(expert: int) -> tuple[Tensor, Tensor, Tensor]:
        return w1_EFL[expert], w3_EFL[expert], w2_ELF[expert]

    held = _Held(_slots(slots_N, len(w1_EFL)), matrices)
    return _by_expert(x_TL, ids_TK - first, weights_TK, held, activation, total_TL)


def experts_mxfp4(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1: Mxfp4,
    w3: Mxfp4,
    w2: Mxfp4,
    first: int,
    activation: Activation,
    slots_N: Tensor | None = None,
    total_TL: Tensor | None = None,
) -> Tensor:
    """The same for MXFP4 experts; one expert at a time is dequantised."""

    def matrices(expert: int) -> tuple[Tensor, Tensor, Tensor]:
        one, three, two = (
            from_mxfp4(Mxfp4(w.packed[expert], w.scale[expert]), x_TL.dtype) for w in (w1, w3, w2)
        )
        return one, three, two

    held = _Held(_slots(slots_N, len(w1.packed)), matrices)
    return _by_expert(x_TL, ids_TK - first, weights_TK, held, activation, total_TL)


class _Held(NamedTuple):
    """Where the experts at hand stand, by number, and their matrices by where they stand."""

    slots: dict[int, int]
    matrices: Callable[[int], tuple[Tensor, Tensor, Tensor]]


def _slots(slots_N: Tensor | None, num_experts: int) -> dict[int, int]:
    if slots_N is None:
        return {expert: expert for expert in range(num_experts)}
    return {expert: slot for expert, slot in enumerate(slots_N.tolist()) if slot >= 0}


def _by_expert(
    x_TL: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    held: _Held,
    activation: Activation,
    total_TL: Tensor | None,
) -> Tensor:
    out_TL = torch.zeros_like(wide(x_TL)) if total_TL is None else total_TL
    for expert in sorted(set(ids_TK.flatten().tolist()) & set(held.slots)):
        tokens_M, places_M = (ids_TK == expert).nonzero(as_tuple=True)
        w1_FL, w3_FL, w2_LF = held.matrices(held.slots[expert])
        rows_ML = x_TL[tokens_M]
        inner_MF = gated_activation(
            functional.linear(rows_ML, w1_FL), functional.linear(rows_ML, w3_FL), activation
        )
        shares_M1 = weights_TK[tokens_M, places_M].unsqueeze(1)
        part_ML = wide(functional.linear(inner_MF, w2_LF)) * shares_M1
        out_TL = out_TL.index_add(0, tokens_M, part_ML)
    return out_TL.to(x_TL.dtype) if total_TL is None else out_TL
