"""Owns the refusal of devices that cannot serve, in one sentence, before anything is loaded.

Knows published architectures and the capabilities of a spec; asks no device.
"""

from __future__ import annotations

from firstlight.errors import EnvironmentProblem
from firstlight.platforms.compatibility import read_compatibility
from firstlight.platforms.spec import DeviceSpec

_OTHER = {"bfloat16": "float16 or float32", "float16": "float32"}


def require_fit(spec: DeviceSpec, dtype: str, kv_dtype: str = "auto") -> None:
    """Raises EnvironmentProblem when the architecture is known not to serve, or the compute type or
    that of caches is one the device lacks. An architecture nobody described is not refused: `probe`
    says unknown.
    """
    known = read_compatibility(spec.kind).architecture(spec.arch)
    if known is not None and not known.serves:
        raise EnvironmentProblem(
            f"{spec.name} (architecture {spec.arch}) is not served: {known.why}; use a newer card "
            f"({known.link})"
        )
    if not spec.can(dtype):
        raise EnvironmentProblem(
            f"{spec.name} does not compute in {dtype}; use --dtype {_OTHER.get(dtype, 'bfloat16')}"
        )
    if kv_dtype == "fp8" and not spec.can("fp8_storage"):
        raise EnvironmentProblem(
            f"{spec.name} is not known to hold FP8; use --kv-dtype int8, which takes the same bytes"
        )
