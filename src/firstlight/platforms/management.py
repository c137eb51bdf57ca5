"""Owns what management libraries that share the calls of NVML tell alike: driver, cards, names.

Knows no vendor: a platform names its library, and adds what only that one tells.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Library(NamedTuple):
    """A library that was started, with the driver's version and a handle for each card."""

    calls: Any
    driver: str
    handles: list[Any]


def open_library(module: str) -> Library:
    """Imports and starts a library. Raises what it raises when it or the driver is absent."""
    calls = importlib.import_module(module)
    calls.nvmlInit()
    count = calls.nvmlDeviceGetCount()
    handles = [calls.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    return Library(calls, _text(calls.nvmlSystemGetDriverVersion()), handles)


def name_and_place(calls: Any, handle: Any) -> dict[str, Any]:
    """Returns `name` and `pci` of a card."""
    name, place = calls.nvmlDeviceGetName(handle), calls.nvmlDeviceGetPciInfo(handle)
    return {"name": _text(name), "pci": _text(place.busId)}


def _text(told: Any) -> str:
    """Some releases tell bytes where others tell text."""
    return told.decode() if isinstance(told, bytes) else str(told)
