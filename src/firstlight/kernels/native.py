"""Owns where compiled kernels lie, under which key, and how they are loaded.

It never compiles, and refuses to know any operation.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "cpp"
MODULE = "firstlight_native"
BUILD_COMMAND = "python -m firstlight.kernels.build"


@dataclass(frozen=True)
class NativeKernels:
    """The loaded extension module and the CPU features this process may use; or why not."""

    module: Any | None
    cpu_features: frozenset[str]
    reason: str | None


def source_files() -> tuple[Path, ...]:
    """Return the C++ files of the native kernels, in a fixed order."""
    return tuple(sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".hpp"}))


def native_path() -> Path:
    """Return where the compiled module for this torch, Python, machine and source must lie.

    CPU features are no part of it: the module holds all variants and asks the CPU when loaded.
    """
    digest = hashlib.blake2b(digest_size=10)
    for part in (torch.__version__, sys.version, platform.machine()):
        digest.update(part.encode() + b"\0")
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    root = Path(sys.prefix) / "share" / "firstlight" / "kernels"
    return root / digest.hexdigest() / f"{MODULE}.so"


def load_native() -> NativeKernels:
    """Load the compiled kernels if they were built for exactly this environment."""
    path = native_path()
    if not path.exists():
        return NativeKernels(None, frozenset(), f"not built here; run {BUILD_COMMAND}")
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None, "a spec with an explicit loader is never None"
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        return NativeKernels(None, frozenset(), f"{path} does not load: {error}")
    return NativeKernels(module, frozenset(module.features()), None)


def compiler() -> str | None:
    """Return the path of the C++ compiler that builds the kernels, or None."""
    return shutil.which("g++") or shutil.which("clang++")
