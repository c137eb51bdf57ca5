"""Owns the question whether the loader finds a library, answered by loading it; torch-free."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path


def answer(words: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns for each of the comma-separated sonames where it was found, or the loader's words."""
    return {name: _load(name) for name in words[0].split(",")}


def _load(name: str) -> dict[str, str]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return {"path": "", "error": str(error)}
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    places = (line.split()[-1] for line in lines if name.split(".so")[0] in line)
    return {"path": next(places, ""), "error": ""}
