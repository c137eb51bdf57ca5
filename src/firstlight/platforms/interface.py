"""Owns what a platform must offer: ten members, the same for each, free of any torch type.

Refuses to know models, kernels and ranks; devices are named the way torch names them, by text.
"""

from __future__ import annotations

from typing import Protocol

from firstlight.platforms.spec import DeviceSpec, Memory


class DeviceRuntime(Protocol):
    """A kind of device on this machine."""

    @property
    def name(self) -> str:
        """The platform's name, which is torch's device type."""
        ...

    @property
    def collective_backend(self) -> str:
        """The torch.distributed backend whose collectives run on this device."""
        ...

    def unavailable(self) -> str | None:
        """Why this platform cannot be used here, or None when it can."""
        ...

    def count(self) -> int:
        """Number of devices."""
        ...

    def spec(self, index: int = 0) -> DeviceSpec:
        """What the device is and has; raises EnvironmentProblem when it cannot be asked."""
        ...

    def memory(self, index: int = 0) -> Memory:
        """The device's memory now."""
        ...

    def peak_bytes(self, index: int = 0) -> int:
        """Most bytes this process has held on the device at once."""
        ...

    def bind(self, index: int, threads: int) -> str:
        """Makes the device current for this process, with that many compute threads.

        Returns the device's name for torch.
        """
        ...

    def synchronize(self, index: int = 0) -> None:
        """Waits until all work queued on the device is done."""
        ...

    def release_cached(self, index: int = 0) -> None:
        """Gives memory that is held but unused back to the device."""
        ...
