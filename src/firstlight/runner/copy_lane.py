"""Owns copies from host memory to the device that run beside the computation, and their order.

Knows bytes alone. On the CPU device and host are the same memory: there is nothing to copy and
nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class CopyLane:
    """One stream of copies to one device.

    `mark` (where the computation is now) and `ready` are called by the thread that computes; `copy`
    by any. What `mark` and `copy` return is None where nothing has to be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_host = device.type == "cpu"
        if not self.is_host:
            self._module: Any = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    def staging(self, num_bytes: int) -> Tensor:
        """Returns host memory, uint8 [num_bytes], that the device can copy from by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not self.is_host)

    def mark(self) -> Any:
        """Returns the point the computation has been told to reach."""
        if self.is_host:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Any) -> Any:
        """Copies each (target, source) once the computation has passed `after`; returns the point
        at which all have arrived."""
        if self.is_host:
            return None
        with self._module.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        return event

    def ready(self, arrived: Any) -> None:
        """Has the computation go on only once a copy has arrived."""
        if arrived is not None:
            self._module.current_stream(self._device).wait_event(arrived)
