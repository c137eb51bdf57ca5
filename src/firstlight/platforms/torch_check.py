"""Owns the question whether a usable torch is installed; everything that needs one asks here.

Refuses to import torch before it is asked to.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from firstlight.errors import EnvironmentProblem
from firstlight.platforms.versions import TORCH, at_least

_HOW = (
    "install your vendor's build, or a CPU build: pip install torch=="
    f"{TORCH.tested} (name the version: the newest may be a build of several GB for another device)"
)


def torch_version() -> str | None:
    """The installed torch's version without importing it; None when there is none."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def torch_problem() -> str | None:
    """Why the installed torch cannot be used, in one sentence; None when it can."""
    version = torch_version()
    if version is None:
        return f"torch is not installed; {_HOW}"
    if version != "unknown" and not at_least(version, TORCH.minimum):
        return f"torch {version} is too old, {TORCH.minimum} is needed; {_HOW}"
    return None


def require_torch() -> Any:
    """Imports torch and returns it; raises EnvironmentProblem saying what to install."""
    problem = torch_problem()
    if problem is not None:
        raise EnvironmentProblem(problem)
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError) as broken:
        raise EnvironmentProblem(f"torch is installed but does not load: {broken}") from broken
