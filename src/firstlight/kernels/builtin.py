"""Owns the list of kernels that come with firstlight, in order of preference.

It refuses to know which of them a model will use: the registry decides from a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from firstlight.kernels.native import NativeKernels, load_native
from firstlight.kernels.reference import (
    attention,
    delta_rule,
    dense,
    experts,
    latent,
    packed,
    quantised,
    residual_mix,
)
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
    "segment_attention": attention.segment_attention,
    "greedy": dense.greedy,
    "gated_activation": experts.gated_activation,
    "experts": experts.experts,
    "experts_mxfp4": experts.experts_mxfp4,
    "short_conv": delta_rule.short_conv,
    "delta_rule": delta_rule.delta_rule,
    "latent_attention": latent.latent_attention,
    "expanded_latent_attention": latent.expanded_latent_attention,
    "segment_latent_attention": latent.segment_latent_attention,
    "int8_paged_attention": quantised.int8_paged_attention,
    "int8_segment_attention": quantised.int8_segment_attention,
    "int8_latent_attention": quantised.int8_latent_attention,
    "int8_segment_latent_attention": quantised.int8_segment_latent_attention,
    "int8_expanded_latent_attention": quantised.int8_expanded_latent_attention,
    "residual_mix": residual_mix.residual_mix,
    "pack_weight_as": packed.pack_weight_as,
    "packed_rows": packed.packed_rows,
    "packed_linear": packed.packed_linear,
    "packed_mlp": packed.packed_mlp,
    "packed_attention": packed.packed_attention,
}


VECTOR_FEATURES = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
TILE_FEATURES = VECTOR_FEATURES | {"amx_bf16", "amx_tile"}
BOTH = (("native_tiles", TILE_FEATURES), ("native_vectors", VECTOR_FEATURES))
NATIVE_VARIANTS = {
    "linear": BOTH,
    "linear_add": BOTH,
    "linear_group": BOTH,
    "gated_mlp_in": BOTH,
    "rms_norm": BOTH[1:],
    "add_rms_norm": BOTH[1:],
    "rotary": BOTH[1:],
    "greedy": BOTH[1:],
    "paged_attention": BOTH[:1],
    "rotary_paged_attention": BOTH[:1],
    "gated_activation": BOTH[1:],
    "experts_mxfp4": BOTH,
    "short_conv": BOTH[1:],
    "delta_rule": BOTH[1:],
    "segment_attention": BOTH[:1],
    "latent_attention": BOTH[:1],
    "segment_latent_attention": BOTH[:1],
    "int8_paged_attention": BOTH[:1],
    "int8_segment_attention": BOTH[:1],
    "int8_latent_attention": BOTH[:1],
    "int8_segment_latent_attention": BOTH[:1],
    "residual_mix": BOTH[1:],
    "pack_weight_as": BOTH[:1],
    "packed_rows": BOTH[:1],
    "packed_linear": BOTH[:1],
    "packed_mlp": BOTH[:1],
    "packed_attention": BOTH[:1],
}

# Operations that no native kernel computes yet, and why that is worth knowing.
NOT_NATIVE_YET = {
    "int8_expanded_latent_attention": "the absorbed form is faster at every length",
}


def builtin_kernels() -> KernelRegistry:
    """Return all kernels this installation has; nothing is compiled here."""
    return KernelRegistry((*_native(load_native()), *_references()))


def machine_query(
    platform: str = "cpu", dtype: str = "float32", sizes: Mapping[str, int] | None = None
) -> KernelQuery:
    """Return a query with the CPU features this process may use on this machine."""
    return KernelQuery(platform, dtype, load_native().cpu_features, sizes or {})


def reference_kernels() -> KernelSet:
    """Return the plain PyTorch kernels for every operation: any device, differentiable."""
    return KernelRegistry(tuple(_references())).resolve(KernelQuery(platform="any"))


def _native(native: NativeKernels) -> Iterator[Kernel]:
    """Yield the compiled kernels, best first; a call one doesn't take goes to its reference."""
    for operation, variants in NATIVE_VARIANTS.items():
        reference = REFERENCES[operation]
        for name, features in variants:
            needs = Needs(
                platforms=frozenset({"cpu"}),
                dtypes=frozenset({"float32"}),
                cpu_features=features if native.module else frozenset(),
                unavailable=native.reason,
            )
            function = reference
            if native.module:
                function = native.module.kernel(operation, reference, name == "native_tiles")
            yield Kernel(operation, name, function, needs)
    for operation, reason in NOT_NATIVE_YET.items():
        yield Kernel(operation, "native_tiles", REFERENCES[operation], Needs(unavailable=reason))


def _references() -> Iterator[Kernel]:
    needs = Needs(dtypes=FLOAT_DTYPES)
    for operation, function in REFERENCES.items():
        yield Kernel(operation, "reference", function, needs)
