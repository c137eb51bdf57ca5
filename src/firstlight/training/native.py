"""Owns compiling and loading the C++ operations of training on a CPU.

It knows no tensor and no operation; without a compiler the plain kernels, slower, train as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import firstlight.kernels.native as kernels_native

SOURCES = Path(kernels_native.__file__).parent / "cpp" / "training"
LIBRARY = "firstlight_training.so"
# Sums may be reassociated, which vectorises them; infinities and NaN keep their meaning.
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-shared", "-march=native", "-mprefer-vector-width=512",
    "-fvisibility=hidden", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math",
    "-fno-math-errno",
)  # fmt: skip
_CLANG_KNOWS_NOT = ("-fassociative-math",)


def load_training_library() -> ctypes.CDLL | None:
    """Returns the compiled operations, compiling them on first use (seconds); None without a
    compiler or when it fails.
    """
    path = library_path()
    if not path.exists() and not _build(path):
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    for function in (library.delta_forward, library.delta_backward):
        function.restype = ctypes.c_bool
    return library


def library_path() -> Path:
    """Returns where the library for these sources, flags and this CPU lies or will lie."""
    digest = hashlib.blake2b(digest_size=10)
    for part in (*FLAGS, platform.machine(), _cpu_name()):
        digest.update(part.encode() + b"\0")
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    root = Path(sys.prefix) / "share" / "firstlight" / "kernels"
    return root / f"training-{digest.hexdigest()}" / LIBRARY


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".hpp"})


def _cpu_name() -> str:
    """What the compiler's tuning depends on; a moved environment is compiled again."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")


def _build(target: Path) -> bool:
    command = kernels_native.compiler()
    if command is None:
        return False
    flags = [f for f in FLAGS if "clang" not in command or f not in _CLANG_KNOWS_NOT]
    sources = [str(path) for path in _sources() if path.suffix == ".cpp"]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / LIBRARY
            done = subprocess.run(
                [command, *flags, *sources, "-o", str(made)], capture_output=True, check=False
            )
            if done.returncode == 0:
                os.replace(made, target)
            return done.returncode == 0
    except OSError:
        return False
