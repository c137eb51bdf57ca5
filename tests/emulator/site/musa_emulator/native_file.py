"""Owns where the compiled emulator for this torch, Python and source lies; compiles nothing."""

import hashlib
import importlib.machinery
import importlib.util
import platform
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "native"
MODULE = "_emulated_musa"
BUILD_COMMAND = "python tests/emulator/build.py"


def source_files() -> tuple[Path, ...]:
    """Returns the C++ files in a fixed order."""
    return tuple(sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".hpp"}))


def native_path(torch_version: str) -> Path:
    """Returns where the module for this torch, Python, machine and source must lie."""
    digest = hashlib.blake2b(digest_size=10)
    for part in (torch_version, sys.version, platform.machine()):
        digest.update(part.encode() + b"\0")
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = Path(sys.prefix) / "share" / "firstlight" / "emulator" / digest.hexdigest()
    return folder / f"{MODULE}.so"


@cache
def load(torch_version: str) -> ModuleType:
    """Returns the compiled module; ImportError names the command that builds it."""
    path = native_path(torch_version)
    if not path.exists():
        raise ImportError(f"the emulated device is not built for this torch; run {BUILD_COMMAND}")
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None, "a spec with an explicit loader is never None"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
