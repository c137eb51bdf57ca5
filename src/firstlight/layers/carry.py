"""Owns what travels from layer to layer and across pipeline cuts: a NamedTuple of [T, ...] tensors.

Most models carry one field, the residual stream. A model with more (a bank of snapshots) defines
its own NamedTuple; everything here works on any of them.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor


class Carry(NamedTuple):
    """The residual stream: `x_TD`."""

    x_TD: Tensor


AnyCarry = TypeVar("AnyCarry", bound=tuple[Tensor, ...])


def select_tokens(carry: AnyCarry, index_S: Tensor) -> AnyCarry:
    """Returns the carry of S chosen tokens; `index_S` is int64."""
    return type(carry)(*(part.index_select(0, index_S) for part in carry))


def finite_tokens(carry: tuple[Tensor, ...]) -> Tensor:
    """Returns a bool [T]: every field of the token is finite. A sum is finite only if no part is
    NaN or infinite (two infinities of opposite sign give NaN)."""
    sums = [part.flatten(1).sum(1, dtype=torch.float32) for part in carry]
    return torch.stack(sums).isfinite().all(0)
