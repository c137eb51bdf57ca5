"""Owns how much memory a rank's process has used at most and may still take."""

import resource

from firstlight.platforms.host import read_host


def peak_resident_bytes() -> int:
    """Returns the largest resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes() -> int:
    """Returns the memory a process here may still take, the limits of a container included."""
    return read_host().memory.available_bytes
