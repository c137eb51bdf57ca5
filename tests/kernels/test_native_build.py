"""Tests of building, finding and sharing the compiled kernels."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.kernels.native import load_native

built = pytest.mark.skipif(
    load_native().module is None, reason=f"native kernels: {load_native().reason}"
)


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_compiler_the_build_says_so_and_succeeds(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.prefix = {str(tmp_path)!r}\n"
        "from firstlight.kernels import build; sys.exit(build.main())"
    )
    done = _python(code, PATH="")
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler found; plain PyTorch is used" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_without_a_build_every_operation_falls_back_and_says_why(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.prefix = {str(tmp_path)!r}\n"
        "from firstlight.kernels.builtin import builtin_kernels, machine_query\n"
        "print('\\n'.join(builtin_kernels().resolve(machine_query()).describe()))"
    )
    lines = _python(code).stdout.splitlines()
    assert lines and all(": reference" in line for line in lines)
    assert "run python -m firstlight.kernels.build" in next(x for x in lines if "linear:" in x)


@built
def test_building_again_changes_nothing() -> None:
    done = _python("import sys; from firstlight.kernels import build; sys.exit(build.main())")
    assert done.returncode == 0 and "already built" in done.stdout


@built
def test_python_threads_may_call_at_the_same_time() -> None:
    native = builtin_kernels().resolve(machine_query())
    weight, inputs = torch.randn(300, 200), [torch.randn(rows, 200) for rows in (1, 5, 20, 90) * 8]
    alone = [native.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: native.linear(x, weight), inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@built
def test_forked_child_has_working_threads() -> None:
    code = (
        "import os, torch\n"
        "from firstlight.kernels.builtin import builtin_kernels, machine_query\n"
        "torch.set_num_threads(2)\n"
        "native = builtin_kernels().resolve(machine_query())\n"
        "x, w = torch.randn(40, 64), torch.randn(400, 64)\n"
        "expected = native.linear(x, w)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = bytes(native.linear(x, w).numpy()) == bytes(expected.numpy())\n"
        "    os._exit(0 if same else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 0
