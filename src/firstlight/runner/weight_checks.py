"""Owns a rank's weights once they are loaded: their checksums, checks and replacement.

Knows neither sockets nor requests; every rank of a world makes the same calls in the same order.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from firstlight.assembly.build import AssembledModel, BuildOptions
from firstlight.assembly.replace import replace_weights
from firstlight.assembly.source import WeightSource, open_source
from firstlight.checkpoint.consistency import WeightWatch, agree_on_weights
from firstlight.checkpoint.executor import Patience
from firstlight.checkpoint.progress import Progress
from firstlight.errors import CheckFailed, ConfigError, FirstlightError
from firstlight.kernels.registry import KernelSet
from firstlight.parallel.mesh import Mesh, node_group
from firstlight.runner.protocol import CheckWeights, WeightsAgreed, WeightsChecked


def reading_group(load_from: str) -> dist.ProcessGroup | None:
    """Returns the group whose first rank reads the store for all: those of this node. None where
    each reads for itself, or is alone.

    It is given longer than a reader that hears nothing from its storage, which says so itself.
    """
    if load_from != "rank0":
        return None
    return node_group(timeout_seconds=2 * Patience().stall_seconds)


class RankWeights:
    """The weights of one rank as kernels read them. `model` is what they belong to."""

    def __init__(
        self,
        model: AssembledModel,
        source: WeightSource,
        *,
        mesh: Mesh,
        kernels: KernelSet,
        options: BuildOptions,
    ) -> None:
        """Takes the checksums of all weights: reads them once, in memory."""
        self.model = model
        self.source = source
        self._mesh = mesh
        self._kernels = kernels
        self._options = options
        self._round = -1
        self._watch: WeightWatch | None = None
        self._group: dist.ProcessGroup | None = None
        self._watch_anew()

    def agree(self, problem: str = "") -> WeightsAgreed:
        """Compares version and shared tensors with those of all ranks; `problem` is why this one
        has none."""
        place = self._mesh.place
        if dist.is_initialized():
            # Digests are no tensors of a device: they pass through host memory.
            if self._group is None and dist.get_backend() != "gloo":
                self._group = dist.new_group(backend="gloo")
            digest, group = self.source.digest, self._group
            try:
                agree_on_weights(self._watch, place, digest, problem=problem, group=group)
            except CheckFailed as error:
                problem = str(error)
        num_bytes = self._watch.num_bytes if self._watch is not None else 0
        return WeightsAgreed(place.rank, self.source.digest, num_bytes, self._seconds, problem)

    def check(self, order: CheckWeights) -> WeightsChecked:
        """Reads the next weights of a round and compares them with their checksums."""
        watch, began, rank = self._watch, time.perf_counter(), self._mesh.place.rank
        if watch is None:  # a reload failed: there is nothing to compare with
            return WeightsChecked(rank, order.round, 0, 0.0, True, [])
        if order.round != self._round:
            self._round = order.round
            watch.begin()
        num_bytes, damages = watch.check_some(order.num_bytes)
        return WeightsChecked(
            rank,
            order.round,
            num_bytes,
            time.perf_counter() - began,
            watch.is_through,
            damages,
        )

    def reload(
        self, path: Path, *, progress: Progress, on_replaced: Callable[[], None]
    ) -> WeightsAgreed:
        """Fills the weights from another source in place and compares them with other ranks'.

        `on_replaced` is called before anybody uses them. What goes wrong is told in the answer;
        weights are then not to be used until a reload succeeded.
        """
        problem = ""
        self._watch = None
        try:
            source = open_source(path)
            if source.spec.config != self.source.spec.config:
                raise ConfigError(f"{path} holds another model than the one served")
            source = replace(source, spec=self.source.spec)  # with what the settings changed of it
            self.model = replace_weights(
                self.model,
                source,
                mesh=self._mesh,
                kernels=self._kernels,
                options=self._options,
                progress=progress,
            )
            self.source = source
            on_replaced()
            self._watch_anew()
        except FirstlightError as error:
            problem = str(error)
        return self.agree(problem)

    def _watch_anew(self) -> None:
        began = time.perf_counter()
        self._watch = WeightWatch(self.model.weights, self.source.spec, self._mesh.place)
        self._seconds = time.perf_counter() - began
