"""Tests of how kernels are chosen."""

import subprocess
import sys

import pytest

from firstlight.errors import EnvironmentProblem
from firstlight.kernels.builtin import builtin_kernels, reference_kernels
from firstlight.kernels.registry import (
    OPERATIONS,
    Kernel,
    KernelQuery,
    KernelRegistry,
    Needs,
)


def _kernel(name: str, **needs: object) -> Kernel:
    return Kernel("linear", name, lambda: name, Needs(**needs))  # type: ignore[arg-type]


REGISTRY = KernelRegistry(
    (
        _kernel("tiles", cpu_features=frozenset({"amx_bf16"}), platforms=frozenset({"cpu"})),
        _kernel("even", unfit=lambda sizes: "odd width" if sizes.get("K", 0) % 2 else None),
        _kernel("plain", dtypes=frozenset({"float32"})),
    )
)


def test_first_that_fits_wins() -> None:
    query = KernelQuery(cpu_features=frozenset({"amx_bf16", "avx2"}))
    assert REGISTRY.choose("linear", query).name == "tiles"


def test_missing_feature_and_size_are_passed_over() -> None:
    assert REGISTRY.choose("linear", KernelQuery(sizes={"K": 4})).name == "even"
    assert REGISTRY.choose("linear", KernelQuery(sizes={"K": 5})).name == "plain"


def test_no_kernel_is_an_error_that_lists_every_reason() -> None:
    query = KernelQuery(platform="cuda", dtype="bfloat16", sizes={"K": 5})
    with pytest.raises(EnvironmentProblem) as caught:
        REGISTRY.choose("linear", query)
    for part in ("tiles needs platform cpu", "odd width", "needs dtype float32"):
        assert part in str(caught.value)


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(AssertionError, match="unknown operations"):
        KernelRegistry((Kernel("polish", "plain", len),))


def test_resolved_set_describes_itself() -> None:
    kernels = builtin_kernels().resolve(KernelQuery(dtype="bfloat16"))
    assert [line.split(":")[0] for line in kernels.describe()] == list(OPERATIONS)
    assert kernels["linear"] is kernels.linear
    with pytest.raises(KeyError, match="polish"):
        kernels["polish"]


def test_references_serve_any_platform() -> None:
    assert all(line.endswith(": reference") for line in reference_kernels().describe())
    assert builtin_kernels().choose("greedy", KernelQuery("musa", "float16")).name == "reference"


def test_registry_alone_imports_no_torch() -> None:
    code = "import sys, firstlight.kernels.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
