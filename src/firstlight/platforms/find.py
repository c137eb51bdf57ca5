"""Owns the list of platforms and the choice of one; knows nothing of what will run on it."""

from __future__ import annotations

from firstlight.errors import EnvironmentProblem, UsageError
from firstlight.platforms.cpu import CpuRuntime
from firstlight.platforms.cuda import CudaRuntime
from firstlight.platforms.interface import DeviceRuntime

# In order of preference; the last is always there.
PLATFORMS: tuple[DeviceRuntime, ...] = (CudaRuntime(), CpuRuntime())


def find_platform(name: str = "auto") -> DeviceRuntime:
    """Returns the platform of that name, or the first usable one for `auto`.

    Raises UsageError for an unknown name, EnvironmentProblem when the platform cannot be used here.
    """
    if name == "auto":
        return next(platform for platform in PLATFORMS if platform.unavailable() is None)
    for platform in PLATFORMS:
        if platform.name == name:
            reason = platform.unavailable()
            if reason is not None:
                raise EnvironmentProblem(f"platform {name} cannot be used: {reason}")
            return platform
    known = ", ".join(platform.name for platform in PLATFORMS)
    raise UsageError(f"there is no platform {name!r}; there are auto, {known}")
