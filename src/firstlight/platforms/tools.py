"""Owns what work on a device needs beyond its runtime: streams, pinned copies, timing, graphs.

Each takes the form the device has, by its spec; knows no vendor and no model.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from firstlight.platforms.interface import DeviceRuntime
from firstlight.platforms.spec import DeviceSpec
from firstlight.platforms.torch_check import require_torch


def pinned(tensor: Any, spec: DeviceSpec) -> Any:
    """Returns the host tensor in pinned memory where the device has that, else as it is."""
    return tensor.pin_memory() if spec.can("pinned") else tensor


def copy_to(tensor: Any, device: str, spec: DeviceSpec) -> Any:
    """Copies a host tensor to the device: without waiting only when its memory is pinned."""
    return tensor.to(device, non_blocking=spec.can("pinned") and tensor.is_pinned())


def new_stream(spec: DeviceSpec) -> Any | None:
    """Returns a stream of the device, None when it has none."""
    device = f"{spec.kind}:{spec.index}"
    return require_torch().Stream(device=device) if spec.can("streams") else None


def seconds_of(work: Callable[[], object], spec: DeviceSpec, runtime: DeviceRuntime) -> float:
    """Runs work once and returns its time on the device, by events or else the host's clock."""
    if not spec.can("event_timing"):
        runtime.synchronize(spec.index)
        began = time.perf_counter()
        work()
        runtime.synchronize(spec.index)
        return time.perf_counter() - began
    torch, device = require_torch(), f"{spec.kind}:{spec.index}"
    first, last = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


class GraphPool:
    """Captured graphs by key; no more live at once than the device can hold, oldest use first out.

    Where the device has no graphs, `run` simply calls the work.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self._spec = spec
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()

    @property
    def live(self) -> int:
        """Number of graphs held."""
        return len(self._graphs)

    @property
    def captures(self) -> bool:
        """Whether the device captures graphs."""
        return self._spec.can("graphs") and not self._spec.has_quirk("graphs_off")

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Replays the graph of a key; captures it first when it is new. Work reads and writes the
        same tensors each time.
        """
        if not self.captures:
            work()
            return
        if key not in self._graphs:
            limit = self._spec.max_live_graphs
            while limit and len(self._graphs) >= limit:
                self._graphs.popitem(last=False)[1].reset()
            self._graphs[key] = self._capture(work)
        self._graphs.move_to_end(key)
        self._graphs[key].replay()

    def _capture(self, work: Callable[[], object]) -> Any:
        module = require_torch().get_device_module(self._spec.kind)
        names = (f"{self._spec.kind.upper()}Graph", "Graph")
        made = next(getattr(module, name) for name in names if hasattr(module, name))()
        work()  # once outside: allocations and first-use set-up must not be captured
        # Its first keyword has another name on each platform, so it goes by position.
        with module.graph(made):
            work()
        return made
