"""Owns what tests may ask of the emulated device and do to it; programs never import this."""

import torch

from musa_emulator import native_file

_native = native_file.load(torch.__version__)


def set_memory_limit(num_bytes: int, device: int = 0) -> None:
    """From now on the device has this much memory."""
    _native.set_memory_limit(device, num_bytes)


def set_copy_delay(milliseconds: int) -> None:
    """How long an asynchronous copy that nobody waits for takes to begin."""
    _native.set_copy_delay(milliseconds)


def host_waits() -> int:
    """How often the host has waited for the device so far."""
    return int(_native.host_waits())


def take_races() -> list[str]:
    """Returns and forgets the places where work used memory it had not waited for."""
    found: list[str] = _native.take_races()
    return found


def live_graphs() -> int:
    """Executables of graphs that are held now."""
    return int(_native.live_graphs())
