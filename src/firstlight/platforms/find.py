"""Owns the list of platforms and the choice of one; knows nothing of what will run on it.

Further platforms come from packages with an entry point in the group `firstlight.platforms`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from firstlight.errors import EnvironmentProblem, UsageError
from firstlight.platforms import cpu, cuda, musa
from firstlight.platforms.interface import DeviceRuntime
from firstlight.platforms.stack import Platform

GROUP = "firstlight.platforms"
# In order of preference; plug-ins come before the last, which is always there.
BUILT_IN: tuple[Platform, ...] = (musa.PLATFORM, cuda.PLATFORM, cpu.PLATFORM)


def platforms() -> tuple[Platform, ...]:
    """Returns every platform in order of preference; a plug-in that does not load is left out."""
    loaded = [one for entry in _plug_ins() if isinstance(one := _load(entry), Platform)]
    return (*BUILT_IN[:-1], *loaded, BUILT_IN[-1])


def broken_plug_ins() -> dict[str, str]:
    """Returns the plug-ins that do not load, by name, with the reason."""
    loaded = {entry.name: _load(entry) for entry in _plug_ins()}
    return {name: found for name, found in loaded.items() if isinstance(found, str)}


def find_platform(name: str = "auto") -> DeviceRuntime:
    """Returns the platform of that name, or the first usable one for `auto`.

    Raises UsageError for an unknown name, EnvironmentProblem when the platform cannot be used here.
    """
    if name == "cpu":
        return cpu.PLATFORM.runtime
    known = platforms()
    if name == "auto":
        return next(one.runtime for one in known if one.runtime.unavailable() is None)
    found = named(name).runtime
    reason = found.unavailable()
    if reason is not None:
        raise EnvironmentProblem(f"platform {name} cannot be used: {reason}")
    return found


def named(name: str) -> Platform:
    """Returns the platform of that name, usable or not.

    Raises UsageError for an unknown name, EnvironmentProblem for a plug-in that does not load.
    """
    known = platforms()
    for one in known:
        if one.name == name:
            return one
    if reason := broken_plug_ins().get(name):
        raise EnvironmentProblem(f"platform {name} does not load: {reason}; reinstall its plug-in")
    listed = ", ".join(one.name for one in known)
    raise UsageError(f"there is no platform {name!r}; there are auto, {listed}")


def _plug_ins() -> list[EntryPoint]:
    own = {one.name for one in BUILT_IN}
    return [entry for entry in entry_points(group=GROUP) if entry.name not in own]


def _load(entry: EntryPoint) -> Platform | str:
    """A plug-in is somebody else's code: whatever it raises is a reason, not our end."""
    try:
        found = entry.load()
    except Exception as broken:
        return f"{type(broken).__name__}: {broken}"
    if isinstance(found, Platform) and found.name == entry.name:
        return found
    return f"{entry.value} is no Platform named {entry.name}"
