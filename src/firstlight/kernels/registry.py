"""Owns what a kernel is, what it needs, and which one is chosen for a machine and dtype.

It refuses to know how any operation is computed, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from firstlight.errors import EnvironmentProblem

OPERATIONS = (
    "rms_norm",
    "add_rms_norm",
    "linear",
    "linear_add",
    "linear_group",
    "gated_mlp_in",
    "rotary",
    "paged_attention",
    "rotary_paged_attention",
    "attention",
    "segment_attention",
    "greedy",
    "gated_activation",
    "experts",
    "experts_mxfp4",
    "short_conv",
    "delta_rule",
    "latent_attention",
    "expanded_latent_attention",
    "segment_latent_attention",
    "int8_paged_attention",
    "int8_segment_attention",
    "int8_latent_attention",
    "int8_segment_latent_attention",
    "int8_expanded_latent_attention",
    "residual_mix",
    "pack_weight_as",
    "packed_rows",
    "packed_linear",
    "packed_mlp",
    "packed_attention",
)

PACKED = tuple(name for name in OPERATIONS if name.startswith("pack"))

FLOAT_DTYPES = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class KernelQuery:
    """What a model asks of its kernels: platform, dtype, CPU features and sizes (may be empty)."""

    platform: str = "cpu"
    dtype: str = "float32"
    cpu_features: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What a kernel needs to run; an empty `platforms` or `dtypes` means any.

    `unfit` looks at the query's sizes and returns why they do not fit, or None.
    `unavailable` is a reason known when the registry was made (a build that is missing).
    """

    platforms: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    cpu_features: frozenset[str] = frozenset()
    unfit: Callable[[Mapping[str, int]], str | None] | None = None
    unavailable: str | None = None

    def reason_against(self, query: KernelQuery) -> str | None:
        """Return why this kernel cannot serve the query, or None when it can."""
        if self.platforms and query.platform not in self.platforms:
            return f"needs platform {_listed(self.platforms)}, not {query.platform}"
        if self.dtypes and query.dtype not in self.dtypes:
            return f"needs dtype {_listed(self.dtypes)}, not {query.dtype}"
        missing = self.cpu_features - query.cpu_features
        if missing:
            return f"needs CPU features {_listed(missing)}"
        if self.unavailable is not None:
            return self.unavailable
        return self.unfit(query.sizes) if self.unfit is not None else None


@dataclass(frozen=True)
class Kernel:
    """One way to compute a named operation; `function` has the reference's signature."""

    operation: str
    name: str
    function: Callable[..., Any]
    needs: Needs = Needs()


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for an operation, and the faster ones passed over with the reason."""

    operation: str
    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)
        return f"{self.operation}: {self.kernel.name}" + (f" ({reasons})" if reasons else "")


@dataclass(frozen=True)
class KernelSet:
    """The functions a model calls, resolved once; fields are named after the operations."""

    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    linear: Callable[..., Any]
    linear_add: Callable[..., Any]
    linear_group: Callable[..., Any]
    gated_mlp_in: Callable[..., Any]
    rotary: Callable[..., Any]
    paged_attention: Callable[..., Any]
    rotary_paged_attention: Callable[..., Any]
    attention: Callable[..., Any]
    segment_attention: Callable[..., Any]
    greedy: Callable[..., Any]
    gated_activation: Callable[..., Any]
    experts: Callable[..., Any]
    experts_mxfp4: Callable[..., Any]
    short_conv: Callable[..., Any]
    delta_rule: Callable[..., Any]
    latent_attention: Callable[..., Any]
    expanded_latent_attention: Callable[..., Any]
    segment_latent_attention: Callable[..., Any]
    int8_paged_attention: Callable[..., Any]
    int8_segment_attention: Callable[..., Any]
    int8_latent_attention: Callable[..., Any]
    int8_segment_latent_attention: Callable[..., Any]
    int8_expanded_latent_attention: Callable[..., Any]
    residual_mix: Callable[..., Any]
    pack_weight_as: Callable[..., Any]
    packed_rows: Callable[..., Any]
    packed_linear: Callable[..., Any]
    packed_mlp: Callable[..., Any]
    packed_attention: Callable[..., Any]
    choices: tuple[Choice, ...] = ()

    def is_plain(self, operation: str) -> bool:
        """Whether the reference computes this operation: nothing faster serves the query."""
        names = {choice.operation: choice.kernel.name for choice in self.choices}
        return names.get(operation, "reference") == "reference"

    @property
    def packs_weights(self) -> bool:
        """Whether every operation on packed weights is faster than unpacking them."""
        return not any(self.is_plain(operation) for operation in PACKED)

    def __getitem__(self, operation: str) -> Callable[..., Any]:
        if operation not in OPERATIONS:
            raise KeyError(f"no operation {operation!r}; there are {', '.join(OPERATIONS)}")
        function: Callable[..., Any] = getattr(self, operation)
        return function

    def describe(self) -> tuple[str, ...]:
        """Return one line per operation: the chosen kernel and why faster ones were passed over."""
        return tuple(str(choice) for choice in self.choices)


@dataclass(frozen=True)
class KernelRegistry:
    """All known kernels, for each operation the fastest first and the reference last."""

    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        unknown = sorted({kernel.operation for kernel in self.kernels} - set(OPERATIONS))
        assert not unknown, f"kernels for unknown operations: {unknown}"
        names = [(kernel.operation, kernel.name) for kernel in self.kernels]
        assert len(names) == len(set(names)), "two kernels of one operation share a name"

    def of(self, operation: str) -> tuple[Kernel, ...]:
        """Return the kernels of an operation in order of preference."""
        return tuple(kernel for kernel in self.kernels if kernel.operation == operation)

    def choose(self, operation: str, query: KernelQuery) -> Kernel:
        """Return the first kernel that can serve the query; raises EnvironmentProblem if none."""
        return self._decide(operation, query).kernel

    def resolve(self, query: KernelQuery) -> KernelSet:
        """Choose every operation once; raises EnvironmentProblem when one has no kernel."""
        choices = tuple(self._decide(operation, query) for operation in OPERATIONS)
        functions = {choice.operation: choice.kernel.function for choice in choices}
        return KernelSet(**functions, choices=choices)

    def _decide(self, operation: str, query: KernelQuery) -> Choice:
        passed_over: list[tuple[str, str]] = []
        for kernel in self.of(operation):
            reason = kernel.needs.reason_against(query)
            if reason is None:
                return Choice(operation, kernel, tuple(passed_over))
            passed_over.append((kernel.name, reason))
        tried = "; ".join(f"{name} {reason}" for name, reason in passed_over) or "none registered"
        raise EnvironmentProblem(
            f"no kernel for {operation} on {query.platform} with {query.dtype} ({tried}); "
            "use another --dtype or platform"
        )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
