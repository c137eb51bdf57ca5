"""Owns what is trained on: token sequences with the places that count, packed into batches.

It knows no task and no model.

Shape letters: T tokens of all sequences back to back, M places that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.layers.packed_batch import PackedBatch, pack_whole


class Picture(NamedTuple):
    """Patches (uint8 bytes [N, 3, P, P]) whose features take the tokens from `first` on."""

    first: int
    grid: tuple[int, int, int]
    patches: bytes


@dataclass(frozen=True)
class Example:
    """A sequence, and for each token whether the model shall predict it. `task` names what its
    accuracy is reported under; the model answers an example when it predicts all such tokens.
    """

    task: str
    tokens: tuple[int, ...]
    counts: tuple[bool, ...]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class TrainingBatch:
    """Examples back to back. `places_M` are tokens after which `targets_M` shall follow; `owner_M`
    is the example each belongs to. `pictures` have places in the whole batch.
    """

    tokens_T: Tensor
    packed: PackedBatch
    places_M: Tensor
    targets_M: Tensor
    owner_M: Tensor
    tasks: tuple[str, ...]
    pictures: tuple[Picture, ...]


def make_batch(examples: Sequence[Example]) -> TrainingBatch:
    """Packs examples. What a token is predicted from is the one before it, so the first of an
    example cannot count.
    """
    tokens: list[int] = []
    places: list[int] = []
    owners: list[int] = []
    pictures: list[Picture] = []
    for owner, example in enumerate(examples):
        assert not example.counts[0], "nothing predicts the first token"
        counted = [len(tokens) + at - 1 for at, counts in enumerate(example.counts) if counts]
        pictures += [p._replace(first=len(tokens) + p.first) for p in example.pictures]
        places += counted
        owners += [owner] * len(counted)
        tokens += example.tokens
    tokens_T, places_M = torch.tensor(tokens), torch.tensor(places, dtype=torch.long)
    return TrainingBatch(
        tokens_T=tokens_T,
        packed=pack_whole([len(example.tokens) for example in examples]),
        places_M=places_M,
        targets_M=tokens_T[places_M + 1],
        owner_M=torch.tensor(owners, dtype=torch.long),
        tasks=tuple(example.task for example in examples),
        pictures=tuple(pictures),
    )
