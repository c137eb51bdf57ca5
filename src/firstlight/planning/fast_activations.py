"""Owns what a part of a layer needs where a native kernel computes it: values alive at once.

The counts are those of the modules' own tensors, as the profiler counts them alive
(tests/planning/test_activations.py counts them again); what kernels keep for themselves is
allocated once and no step's. Knows no engine and no plain form.
"""

from __future__ import annotations

from collections.abc import Collection

from firstlight.planning.work import LayerKind, ModelWork
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import GroupedQueryState, LatentState, RecurrentState

# Rows of a recurrent layer alive at once: projections before and after their convolution and what
# joins them; later queries, keys and values, the output, its norm, the gate and their product.
RECURRENT_ROWS = 9
# Gate, up and their product, where the activation is one kernel; the product alone where the whole
# feed-forward is.
SITU_ROWS, GATED_ROWS = 3, 1
_ATTENTION = {
    "grouped_query": "paged_attention",
    "latent": "latent_attention",
    "recurrent": "delta_rule",
}


def fast_attention_values(
    work: ModelWork, kind: LayerKind, layout: Layout, native: Collection[str]
) -> float | None:
    """Returns the values a token needs in a layer's attention, beside input and carry; None when
    no native kernel computes it.
    """
    state, dims, tp = kind.state, work.facts.dims, layout.tp
    if _ATTENTION.get(state.kind) not in native:
        return None
    if isinstance(state, RecurrentState):
        return RECURRENT_ROWS * state.heads / tp * state.key_dim
    if isinstance(state, LatentState):
        # Queries, the cached row, absorbed queries with the shared part, the mix and its values.
        heads = work.facts.axes["heads"].pieces / tp
        rows = (dims["q_rows"] + dims["value_rows"]) / tp
        return rows + state.width + heads * (dims["kv_rank"] + state.width)
    if isinstance(state, GroupedQueryState):
        keys = 2 * state.local_heads(tp) * state.head_dim
        return 2 * dims["q_rows"] / tp + keys + work.hidden
    return None


def fast_gated_values(work: ModelWork, width: float, native: Collection[str]) -> float | None:
    """Returns the values a token needs in a gated feed-forward of that width, beside input and
    carry; None when no native kernel computes it.
    """
    if getattr(work.spec.config, "situ", None) is not None:
        return SITU_ROWS * width if "gated_activation" in native else None
    # The attended rows and the stream before them are still held, beside the output.
    return GATED_ROWS * width + 2 * work.hidden if "gated_mlp_in" in native else None


def fast_routed_values(work: ModelWork, native: Collection[str]) -> float | None:
    """Returns the values a token needs in routed experts: scores, what experts read and write."""
    if "experts_mxfp4" not in native:
        return None
    return 3 * work.facts.num_experts + 2 * work.facts.dims["latent"] + work.hidden
