"""Owns how the tokens of one step are laid out for the layers; knows no request and no policy.

Shape letters: T tokens of all sequences back to back, B sequences, P pages of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class PlacedFeatures(NamedTuple):
    """Rows [M, D] that take the place of the embeddings of packed tokens `index_M` (int64)."""

    index_M: Tensor
    rows_MD: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of B sequences. Sequence b owns tokens [bounds[b], bounds[b + 1]), its newest ones.

    `positions_T` (int64) is each token's place in its sequence. `starts_B1` (int32) holds `bounds`
    as a tensor. With a cache, `contexts_B` (int32) is the number of tokens each sequence has once
    this step is written, and `tables` holds per cache group the pages of each sequence, [B, P]
    int32. `features` are encoder outputs to be put in the place of placeholder tokens. `adapters_T`
    is reserved for an adapter index per token.
    """

    positions_T: Tensor
    bounds: tuple[int, ...]
    starts_B1: Tensor
    contexts_B: Tensor | None = None
    tables: tuple[Tensor, ...] = ()
    features: PlacedFeatures | None = None
    adapters_T: Tensor | None = field(default=None)

    @cached_property
    def fresh_B(self) -> Tensor:
        """Bool [B]: the sequence begins with this step, so nothing its slots hold is its own."""
        assert self.contexts_B is not None, "only a batch with a cache has contexts"
        return self.contexts_B == self.starts_B1[1:] - self.starts_B1[:-1]

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.bounds) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.bounds[-1]


def pack_whole(lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedBatch:
    """Returns a batch of whole sequences without a cache: training, and the plain reference."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    positions = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.arange(0)
    return PackedBatch(
        positions_T=positions.to(device),
        bounds=tuple(bounds),
        starts_B1=torch.tensor(bounds, dtype=torch.int32, device=device),
    )
