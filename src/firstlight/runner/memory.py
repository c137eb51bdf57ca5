"""Owns which device a rank computes on, and what memory it has used and may still take there."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.platforms.find import find_platform
from firstlight.platforms.fitness import require_fit
from firstlight.platforms.interface import DeviceRuntime


@dataclass(frozen=True)
class RankDevice:
    """The device of one of `ranks` on this machine: devices are dealt out to ranks in turn."""

    platform: DeviceRuntime
    rank: int = 0
    ranks: int = 1

    @property
    def index(self) -> int:
        """The device's number among those of its platform."""
        return self.rank % self.platform.count()

    @property
    def collective_backend(self) -> str:
        """The backend whose collectives run on the device."""
        return self.platform.collective_backend

    def bind(self, threads: int) -> str:
        """Makes the device current for this process; returns its name for torch."""
        return self.platform.bind(self.index, threads)

    def available_bytes(self, *, kept: int = 0) -> int:
        """Returns the rank's part of what the device has left, less `kept` for other things.

        Ranks that share a device share its memory: each may take its part of what the last one saw.
        """
        sharing = -(-self.ranks // self.platform.count())
        return max(0, self.platform.memory(self.index).available_bytes - kept) // sharing

    @property
    def description(self) -> str:
        """The device's spec in one line, as it was resolved."""
        return str(self.platform.spec(self.index))

    def require_fit(self, dtype: str, kv_dtype: str) -> None:
        """Raises EnvironmentProblem when the device cannot serve in this type with such caches."""
        require_fit(self.platform.spec(self.index), dtype, kv_dtype)

    @property
    def owned(self) -> bool:
        """Whether the device has memory of its own, which nothing but an engine uses."""
        return not self.platform.spec(self.index).can("host_memory")

    def peak_bytes(self) -> int:
        """Returns the most memory this process has held on the device."""
        return self.platform.peak_bytes(self.index)


def first_device(device: str, ranks: int) -> RankDevice:
    """Returns the device of the first of so many ranks, by the platform's name."""
    return RankDevice(find_platform(device), ranks=ranks)
