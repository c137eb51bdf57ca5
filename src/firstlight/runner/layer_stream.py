"""Owns the layers that take turns in memory: while one computes, the next one arrives.

The layers themselves do not know: their parameters are views of the buffer the layer is in. Knows
the order of layers, and nothing of experts or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firstlight.checkpoint.executor import Job
from firstlight.checkpoint.pieces import PieceKey
from firstlight.checkpoint.reading_threads import Reading
from firstlight.runner.piece_feed import PieceFeed


@dataclass
class _Buffer:
    """Memory for one layer. On a device `staging` is the host memory its reads go to; `arrived` is
    the end of the last copy from there."""

    memory: Tensor
    staging: Tensor
    layer: int = -1
    reading: Reading | None = None
    arrived: Any = None


class _Bound(NamedTuple):
    """A parameter of a layer that is in one certain buffer, and whose it is."""

    owner: nn.Module
    leaf: str
    parameter: nn.Parameter


class LayerStream:
    """Layers, by number and in the order they compute, over `num_buffers` buffers.

    `host` has layers that are kept whole in host memory; the others are read from their files.
    """

    def __init__(
        self,
        layers: Sequence[int],
        feed: PieceFeed,
        *,
        device: torch.device,
        num_buffers: int,
        buffer_bytes: int,
    ) -> None:
        self._layers, self._feed = list(layers), feed
        self._host: dict[int, Tensor] = {}
        lane = feed.lane
        self._buffers = []
        for _ in range(num_buffers):
            memory = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
            staging = memory if lane.is_host else lane.staging(buffer_bytes)
            self._buffers.append(_Buffer(memory, staging))
        self._bound: dict[int, list[list[_Bound]]] = {}
        self._next = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def attach(self, module: nn.Module) -> None:
        """Gives the layers of a model their parameters, and hooks that wait and let go."""
        for layer in self._layers:
            image = self._feed.image(PieceKey(layer))
            self._bound[layer] = []
            for buffer in self._buffers:
                views = image.views(buffer.memory)
                self._bound[layer].append([_bound(module, *item) for item in views.items()])
            self._bind(layer, 0)
            block = module.get_submodule(f"layers.{layer}")
            block.register_forward_pre_hook(partial(self._enter, layer))
            block.register_forward_hook(partial(self._leave, layer))

    def read_all(self, host_bytes: int, advanced: Callable[[int, str], None]) -> int:
        """Reads every layer once, digests compared: as many as `host_bytes` hold stay in host
        memory. `advanced(bytes, what)` is told of each. Returns the host bytes taken."""
        taken = 0
        for layer in self._layers:
            image = self._feed.image(PieceKey(layer))
            keeps = taken + image.num_bytes <= host_bytes
            memory = self._buffers[0].staging
            if keeps:
                memory = self._host[layer] = self._feed.lane.staging(image.num_bytes)
                taken += image.num_bytes
            self._feed.wait(self._read(layer, memory))
            advanced(self._feed.pieces.pieces[PieceKey(layer)].num_bytes, f"layer {layer}")
        return taken

    def start(self) -> None:
        """Lets the first layers arrive."""
        for _ in self._buffers:
            self._begin_next()

    def _read(self, layer: int, memory: Tensor, then: Callable[[], None] | None = None) -> Reading:
        key = PieceKey(layer)
        feed, views = self._feed, self._feed.image(key).views(memory)
        check = feed.is_checked(key)

        def after() -> None:
            if check:
                feed.pieces.compare(key, views)
            if then is not None:
                then()

        return feed.threads.start(feed.read_jobs(key, views, check=check), after)

    def _begin_next(self) -> None:
        """Has the next layer arrive in a buffer that is free, if there is one."""
        buffer = next((b for b in self._buffers if b.layer < 0), None)
        if buffer is None:
            return
        layer = self._layers[self._next]
        self._next = (self._next + 1) % len(self._layers)
        buffer.layer = layer
        feed, lane = self._feed, self._feed.lane
        num_bytes, host = feed.image(PieceKey(layer)).num_bytes, self._host.get(layer)
        passed = lane.mark()  # what has used the buffer until now

        def move() -> None:
            source = buffer.staging if host is None else host
            pairs = [(buffer.memory[:num_bytes], source[:num_bytes])]
            buffer.arrived = lane.copy(pairs, after=passed)

        if host is None:
            if buffer.arrived is not None:
                buffer.arrived.synchronize()  # the copy out of this staging memory
            buffer.reading = self._read(layer, buffer.staging, move)
        else:
            buffer.reading = feed.threads.start(self._host_jobs(layer, buffer), move)

    def _host_jobs(self, layer: int, buffer: _Buffer) -> list[Job]:
        """What brings a layer from host memory: copies on the CPU, else nothing before `move`."""
        key, host = PieceKey(layer), self._host[layer]
        if self._feed.lane.is_host:
            return self._feed.copy_jobs(key, buffer.memory[: host.numel()], host)
        return [self._feed.present_job(key, host.numel())]

    def _enter(self, layer: int, *_: Any) -> None:
        number = self._find(layer)
        if number < 0:
            self._begin_at(layer)
            number = self._find(layer)
        buffer = self._buffers[number]
        assert buffer.reading is not None
        self._feed.wait(buffer.reading)
        self._feed.lane.ready(buffer.arrived)
        self._bind(layer, number)

    def _leave(self, layer: int, *_: Any) -> None:
        number = self._find(layer)
        if number >= 0:
            self._buffers[number].layer = -1
        self._begin_next()

    def _find(self, layer: int) -> int:
        numbers = (n for n, buffer in enumerate(self._buffers) if buffer.layer == layer)
        return next(numbers, -1)

    def _begin_at(self, layer: int) -> None:
        """Somebody wants another layer than the order says: begins anew from there."""
        for buffer in self._buffers:
            if buffer.reading is not None:
                self._feed.wait(buffer.reading)
            buffer.layer = -1
        self._next = self._layers.index(layer)
        self.start()

    def _bind(self, layer: int, number: int) -> None:
        for owner, leaf, parameter in self._bound[layer][number]:
            owner._parameters[leaf] = parameter


def _bound(module: nn.Module, name: str, tensor: Tensor) -> _Bound:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    assert leaf in owner._parameters, f"the module has no parameter {name}"
    return _Bound(owner, leaf, nn.Parameter(tensor, requires_grad=False))
