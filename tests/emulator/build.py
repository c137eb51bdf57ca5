"""Owns compiling the emulated device into the environment, as a command.

Knows only the files; what they do is their own matter. Does nothing when it was done before.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Loading torch would load the emulated device, which may not be there yet.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.path.insert(0, str(Path(__file__).parent / "site"))

import torch
from musa_emulator.native_file import native_path, source_files

WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")


def main() -> int:
    """Compiles unless it was done before; prints one line; returns 1 when the compiler failed."""
    target = native_path(torch.__version__)
    if target.exists():
        print(f"emulated device: already built ({target})")
        return 0
    start = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        sources = [path for path in source_files() if path.suffix == ".cpp"]
        # The largest first: they decide how long it takes.
        sources.sort(key=lambda path: -path.stat().st_size)
        objects = [Path(folder) / f"{path.stem}.o" for path in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            failures = [text for text in pool.map(_compile, sources, objects) if text]
        library = Path(folder) / target.name
        failures = failures or [text for text in [_link(objects, library)] if text]
        if failures:
            print(f"emulated device: the compiler failed\n{failures[0]}")
            return 1
        os.replace(library, target)
    print(f"emulated device: built in {time.perf_counter() - start:.1f} s ({target})")
    return 0


def _compile(source: Path, target: Path) -> str:
    headers = Path(torch.__file__).parent / "include"
    folders = (
        headers,
        headers / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_paths()["include"]),
    )
    arguments = ["-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", *WARNINGS]
    arguments += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    arguments += [word for folder in folders for word in ("-isystem", str(folder))]
    return _run([*arguments, "-c", str(source), "-o", str(target)])


def _link(objects: list[Path], target: Path) -> str:
    libraries = Path(torch.__file__).parent / "lib"
    arguments = ["-shared", *map(str, objects), "-o", str(target), f"-L{libraries}"]
    return _run([*arguments, "-ltorch_cpu", "-lc10", "-lpthread"])


def _run(arguments: list[str]) -> str:
    """Runs the C++ compiler; returns what it said when it failed, else nothing."""
    command = [os.environ.get("CXX", "g++"), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"there is no C++ compiler {command[0]!r}; install g++ or set CXX"
    return "" if done.returncode == 0 else done.stderr or f"exit status {done.returncode}"


if __name__ == "__main__":
    raise SystemExit(main())
