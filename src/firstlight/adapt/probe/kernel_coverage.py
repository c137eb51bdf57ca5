"""Owns the verdict over every registered kernel on a device: fast, reference, missing or wrong.

Each is run on small known inputs and compared with its plain reference, computed in float64 on the
CPU; nothing is believed because it is registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.adapt.probe.findings import words_of
from firstlight.adapt.probe.kernel_cases import MAKERS, Inputs, inputs_of, mapped, tensors_in
from firstlight.kernels.builtin import REFERENCES, builtin_kernels, machine_query
from firstlight.kernels.registry import OPERATIONS, PACKED, Kernel, KernelQuery, KernelRegistry
from firstlight.platforms.find import find_platform

FAST, REFERENCE, MISSING, WRONG, UNKNOWN = "fast", "reference", "missing", "wrong", "unknown"
# Of the largest magnitude expected. A sum of a few hundred products in fp32 is good to 1e-6; half
# types round each value they hand on.
TOLERANCES = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}
_PACKED_DTYPE = "float32"


@dataclass(frozen=True)
class Verdict:
    """What one kernel of an operation is on a device, and how that is known."""

    operation: str
    kernel: str
    state: str
    detail: str


def answer(words: Sequence[str]) -> dict[str, Any]:
    """Judges every kernel on a platform's first device, for a dtype: `kernels PLATFORM DTYPE`."""
    platform = find_platform(words[0])
    device = platform.bind(0, 1)
    query = machine_query(platform=platform.name, dtype=words[1])
    verdicts = judge_all(builtin_kernels(), query, device)
    rows = [[v.operation, v.kernel, v.state, v.detail] for v in verdicts]
    return {"dtype": words[1], "verdicts": rows}


def judge_all(registry: KernelRegistry, query: KernelQuery, device: str) -> list[Verdict]:
    """Returns a verdict for each kernel of each operation, in order of preference."""
    return [
        judge(kernel, query, device)
        for operation in OPERATIONS
        for kernel in registry.of(operation)
    ]


@torch.no_grad()
def judge(kernel: Kernel, query: KernelQuery, device: str) -> Verdict:
    """Runs one kernel on all its inputs and compares results and changed state."""
    reason = kernel.needs.reason_against(query)
    if kernel.operation not in MAKERS:
        return Verdict(kernel.operation, kernel.name, UNKNOWN, "there are no inputs to judge it by")
    if reason is None and kernel.operation in PACKED and query.dtype != _PACKED_DTYPE:
        reason = f"packed weights are {_PACKED_DTYPE}"
    if reason is not None:
        return Verdict(kernel.operation, kernel.name, MISSING, reason)
    dtype = getattr(torch, query.dtype)
    worst = 0.0
    for inputs in inputs_of(kernel.operation, dtype):
        expected = _expected(kernel.operation, inputs)
        try:
            found = _run(kernel.function, mapped(lambda t: t.to(device, copy=True), inputs))
        except (RuntimeError, TypeError, AttributeError) as error:
            return Verdict(kernel.operation, kernel.name, MISSING, words_of(error))
        worst = max(worst, _difference(found, expected))
    limit = TOLERANCES[query.dtype]
    right = REFERENCE if kernel.name == "reference" else FAST
    state = right if worst <= limit else WRONG
    return Verdict(kernel.operation, kernel.name, state, f"off by {worst:.1e} of {limit:.0e}")


def _run(function: Any, inputs: Inputs) -> list[Tensor]:
    result = function(*inputs)
    return [tensor.cpu() for tensor in (*tensors_in(result), *tensors_in(inputs))]


def _expected(operation: str, inputs: Inputs) -> list[Tensor]:
    """Packed weights and INT8 caches are defined by fp32, whose roundings are part of them;
    everything else has a float64 to be measured by.
    """
    by_fp32 = operation in PACKED or operation.startswith("int8_")
    wide = torch.float32 if by_fp32 else torch.float64

    def widen(tensor: Tensor) -> Tensor:
        return tensor.to(wide, copy=True) if tensor.is_floating_point() else tensor.clone()

    return _run(REFERENCES[operation], mapped(widen, inputs))


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference over the largest magnitude; infinite for shapes, integers and NaN."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if not one.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(one.long(), other.long()) else float("inf"))
            continue
        off = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(1e-30)
        worst = max(worst, float(off) if bool(torch.isfinite(off)) else float("inf"))
    return worst
