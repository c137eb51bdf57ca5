"""Owns the list of kernels that come with firstlight, in order of preference.

It refuses to know which of them a model will use: the registry decides from a query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firstlight.kernels.reference import attention, dense
from firstlight.kernels.registry import (
    FLOAT_DTYPES,
    Kernel,
    KernelQuery,
    KernelRegistry,
    KernelSet,
    Needs,
)

REFERENCES: dict[str, Callable[..., Any]] = {
    "rms_norm": dense.rms_norm,
    "add_rms_norm": dense.add_rms_norm,
    "linear": dense.linear,
    "linear_add": dense.linear_add,
    "linear_group": dense.linear_group,
    "gated_mlp_in": dense.gated_mlp_in,
    "rotary": dense.rotary,
    "paged_attention": attention.paged_attention,
    "rotary_paged_attention": attention.rotary_paged_attention,
    "attention": attention.attention,
    "greedy": dense.greedy,
}


def builtin_kernels() -> KernelRegistry:
    """Return all kernels this installation has; nothing is compiled here."""
    return KernelRegistry(_references())


def reference_kernels() -> KernelSet:
    """Return the plain PyTorch kernels for every operation: any device, differentiable."""
    return KernelRegistry(_references()).resolve(KernelQuery(platform="any"))


def _references() -> tuple[Kernel, ...]:
    needs = Needs(dtypes=FLOAT_DTYPES)
    return tuple(
        Kernel(operation, "reference", function, needs)
        for operation, function in REFERENCES.items()
    )
