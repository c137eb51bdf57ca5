"""Owns compiling the native kernels once into the environment, as a command.

It refuses to know what the kernels compute; without a compiler the references serve.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from firstlight.kernels.native import compiler, native_path, source_files

# GCC 12 warns of its own intrinsics headers.
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers",
            "-Wno-uninitialized", "-Wno-maybe-uninitialized")  # fmt: skip
VECTORS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mavx2", "-mf16c")


def main() -> int:
    """Compile unless it was done before; print one line; return 0 unless the compiler failed."""
    target = native_path()
    command = compiler()
    if target.exists():
        print(f"native kernels: already built ({target})")
    elif command is None:
        print("native kernels: not built, no C++ compiler found; plain PyTorch is used")
    elif platform.machine() not in {"x86_64", "AMD64"} or sys.platform != "linux":
        print("native kernels: not built, they are for Linux on x86-64; plain PyTorch is used")
    else:
        return _build(command, target)
    return 0


def _build(command: str, target: Path) -> int:
    start = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = [path for path in source_files() if path.suffix == ".cpp"]
        objects = [Path(folder) / f"{path.stem}.o" for path in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            failures = [
                text for text in pool.map(_compile, [command] * 99, sources, objects) if text
            ]
        library = Path(folder) / target.name
        failures = failures or [text for text in [_link(command, objects, library)] if text]
        if failures:
            print(f"native kernels: the compiler failed, plain PyTorch is used\n{failures[0]}")
            return 1
        os.replace(library, target)
    print(f"native kernels: built in {time.perf_counter() - start:.1f} s ({target})")
    return 0


def _compile(command: str, source: Path, target: Path) -> str:
    """Compile one file; return what the compiler said when it failed, else nothing."""
    binding = source.stem.startswith("binding")
    flags = [*_binding_flags()] if binding else ["-O3", *VECTORS]
    return _run([command, "-std=c++20", "-fPIC", "-fvisibility=hidden", *WARNINGS, *flags,
                 "-c", str(source), "-o", str(target)])  # fmt: skip


def _binding_flags() -> tuple[str, ...]:
    headers = Path(torch.__file__).parent / "include"
    return (
        "-O1",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-isystem", str(headers)),
        *("-isystem", str(headers / "torch" / "csrc" / "api" / "include")),
        *("-isystem", sysconfig.get_paths()["include"]),
    )


def _link(command: str, objects: list[Path], target: Path) -> str:
    libraries = Path(torch.__file__).parent / "lib"
    return _run([command, "-shared", *map(str, objects), "-o", str(target), f"-L{libraries}",
                 "-ltorch_python", "-ltorch_cpu", "-lc10", "-lpthread"])  # fmt: skip


def _run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr or f"exit status {done.returncode}"


if __name__ == "__main__":
    raise SystemExit(main())
