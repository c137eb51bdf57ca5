"""Owns the rehearsal of what ranks build at a start: process groups and modules, without storage.

Knows no plan and no report; collectives of the groups do nothing and tensors have shapes alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from firstlight.assembly.build import rehearse_rank
from firstlight.errors import FirstlightError
from firstlight.kernels.registry import KernelSet
from firstlight.models.spec import ModelSpec
from firstlight.parallel.mesh import Mesh, tensor_group
from firstlight.sharding.layout import Layout


@dataclass(frozen=True)
class BuiltRank:
    """One rank built for all `ranks` of equal shapes. `problem` says why it could not be, else "".

    `num_bytes` are those its parameters would take.
    """

    ranks: tuple[int, ...]
    num_parameters: int
    num_bytes: int
    seconds: float
    problem: str = ""


@contextmanager
def pretended_world(layout: Layout, rank: int) -> Iterator[Mesh]:
    """Gives the mesh of a rank in a world of which only this rank is real.

    Creates every process group that a real start creates. The process must be in no world.
    """
    place = layout.place(rank)
    if layout.world_size == 1:
        yield Mesh(place)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield Mesh(place, tensor_group(layout, rank))
    finally:
        dist.destroy_process_group()


def rehearse_groups(layout: Layout, expected: Sequence[Sequence[int]]) -> str:
    """Creates the process groups of every rank in turn, and says what is wrong with them, or "".

    `expected` are the ranks of every tensor parallel group.
    """
    for rank in range(layout.world_size):
        with pretended_world(layout, rank) as mesh:
            wanted = next((list(group) for group in expected if rank in group), [])
            found = dist.get_process_group_ranks(mesh.tensor) if mesh.tensor else [rank]
            if found != wanted:
                return f"rank {rank} sums with {found}, planned is {wanted}"
    return ""


def rehearse_builds(
    spec: ModelSpec,
    layout: Layout,
    alike: Sequence[Sequence[int]],
    *,
    kernels: KernelSet,
    dtype: torch.dtype,
) -> tuple[BuiltRank, ...]:
    """Builds and cuts one rank, the last, of each set of ranks that hold equal shapes."""
    return tuple(_build(spec, layout, tuple(ranks), kernels, dtype) for ranks in alike)


def _build(
    spec: ModelSpec, layout: Layout, ranks: tuple[int, ...], kernels: KernelSet, dtype: torch.dtype
) -> BuiltRank:
    began = time.monotonic()
    with pretended_world(layout, ranks[-1]) as mesh:
        try:
            module, num_bytes = rehearse_rank(spec, mesh, kernels=kernels, dtype=dtype)
        except (FirstlightError, AssertionError, RuntimeError) as error:
            return BuiltRank(ranks, 0, 0, time.monotonic() - began, str(error))
        count = sum(1 for _ in module.parameters())
    return BuiltRank(ranks, count, num_bytes, time.monotonic() - began)
