"""Owns which process groups a rank belongs to; knows no model and no tensor name."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from firstlight.errors import EnvironmentProblem
from firstlight.sharding.layout import Layout, Place


@dataclass(frozen=True)
class Mesh:
    """A rank's place and its groups. `tensor` is None when TP is 1: nothing is ever communicated.

    A mesh has axes, a tensor has dims.
    """

    place: Place
    tensor: dist.ProcessGroup | None = None

    @property
    def tp(self) -> int:
        """Ranks that share each tensor."""
        return self.place.layout.tp

    @property
    def is_first(self) -> bool:
        """Says whether this rank samples for its tensor parallel group."""
        return self.place.tp_index == 0


def join(
    layout: Layout, rank: int, *, init_method: str, backend: str = "gloo", timeout_seconds: int = 60
) -> Mesh:
    """Creates the process groups of a rank and returns its mesh; nothing is created for one rank.

    Every rank of the layout must call this. Raises EnvironmentProblem naming rank, rendezvous and
    backend when the group does not come together in time.
    """
    place = layout.place(rank)
    if layout.world_size == 1:
        return Mesh(place)
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"rank {rank} of {layout.world_size} could not join the {backend} group at "
            f"{init_method} within {timeout_seconds} s: {error}"
        ) from error
    return Mesh(place, tensor_group(layout, rank))


def tensor_group(layout: Layout, rank: int) -> dist.ProcessGroup | None:
    """Returns the group of ranks that share tensors with `rank`, within an initialised world."""
    if layout.tp == 1:
        return None
    mine: dist.ProcessGroup | None = None
    for ranks in tensor_ranks(layout):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = group
    return mine


def tensor_ranks(layout: Layout) -> Sequence[range]:
    """Returns the ranks of every tensor parallel group: TP is the innermost coordinate."""
    return [range(i, i + layout.tp) for i in range(0, layout.world_size, layout.tp)]


def node_group(*, timeout_seconds: float, node: str = "") -> dist.ProcessGroup | None:
    """Returns the group of ranks on this rank's node, able to move host memory; None outside a
    world. Every rank of the world must call this.

    A node is told apart by its `node` name, the host's own where none is given.
    """
    if not dist.is_initialized():
        return None
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, node or socket.gethostname())
    mine: dist.ProcessGroup | None = None
    for name in dict.fromkeys(names):
        ranks = [rank for rank, other in enumerate(names) if other == name]
        timeout = timedelta(seconds=timeout_seconds)
        group = dist.new_group(ranks, backend="gloo", timeout=timeout)
        if dist.get_rank() in ranks:
            mine = group
    return mine
