"""Owns what one step needs beside weights and caches: live values of the widest moment of a layer.

The coefficients were counted on the plain forms of the kernels, which every platform can fall back
to, as bytes alive at once (tests/planning/test_activations.py counts them again); faster kernels
need less. Knows no engine; T are tokens of a step, s bytes of a value in the compute type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firstlight.planning.work import LayerKind, ModelWork
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import GroupedQueryState, LatentState, RecurrentState

_FP32 = 4
# fp32 values alive at once: of each channel in the delta rule; of each score of a block of context
# in latent attention; of each column of a gated feed-forward; of each channel of each row in a mix
# of residuals.
DELTA_RULE, SCORES, GATED, MIX = 16.6, 3.0, 6.0, 2.15
# The same of a column where the gate is SiLU, in the compute type.
PLAIN_GATED = 3.5
# Grouped attention: copies of the context's keys and values, of queries, and bytes of a score's
# mask (as a truth value, then in a type that depends on s), for so many queries at once. Fitted to
# counts with torch 2.13 on CPU, whose attention is a black box.
GATHERED, QUERIES, MASK, MASK_BY_SIZE, QUERY_ROWS = 1.25, 4.2, 3.4, 0.4, 512
# Context rows that latent attention takes at once.
CONTEXT_ROWS = 2048
# Bytes of an expert's matrix while its codes are looked up, beside the values in compute type.
DEQUANTISED = 20
# The fullest expert's tokens over the mean.
_FULLEST = 8
# Bytes a patch needs in the encoder for each attention channel and each channel of the tower.
PATCH_ATTENTION, PATCH_HIDDEN = 17, 6


@dataclass(frozen=True)
class StepShape:
    """The largest step: `tokens` in all, `span` of one prompt, the longest `context`, and how many
    `sequences` ask for logits.
    """

    tokens: int
    span: int
    context: int
    sequences: int


def activation_bytes(work: ModelWork, layout: Layout, step: StepShape) -> int:
    """Returns the most bytes alive in a forward pass of one rank, logits and encoder left out.

    The carry and a layer's input, plain and normed, stay throughout; on top comes the widest of a
    layer's moments, or a second carry where a snapshot is taken.
    """
    values = step.tokens * work.table.element_bytes
    widest = max(max(moments_of(work, kind, layout, step).values()) for kind in work.kinds)
    return values * (work.carry + 2 * work.hidden) + int(max(widest, values * work.carry))


def moments_of(
    work: ModelWork, kind: LayerKind, layout: Layout, step: StepShape
) -> Mapping[str, float]:
    """Returns the bytes alive in each part of a layer, by part."""
    dims, tokens = work.facts.dims, step.tokens
    wide = tokens * _FP32
    found = {"attention": attention_bytes(work, kind, layout, step)}
    if work.bank_rows:
        found["mix"] = MIX * wide * work.hidden * (1 + work.bank_rows)
    if not kind.has_experts:
        found["feed-forward"] = _gated_width(work) * tokens * dims["ffn"] / layout.tp
        return found
    shared = dims.get("shared_ffn", 0) / layout.tp
    found["shared experts"] = _gated_width(work) * tokens * shared
    found["routed experts"] = _routed_bytes(work, kind, layout, step)
    return found


def attention_bytes(work: ModelWork, kind: LayerKind, layout: Layout, step: StepShape) -> float:
    """Returns the bytes alive in one layer's attention; sequences are taken one after the other."""
    state, size, facts = kind.state, work.table.element_bytes, work.facts
    if isinstance(state, RecurrentState):
        channels = state.heads / layout.tp * state.key_dim
        return DELTA_RULE * _FP32 * step.tokens * channels
    if isinstance(state, LatentState):
        return _latent_bytes(work, state, layout, step)
    if isinstance(state, GroupedQueryState):
        rows = GATHERED * step.context * state.token_bytes(layout.tp, size)
        each = MASK + MASK_BY_SIZE * size
        scores = each * min(step.span, QUERY_ROWS) * step.context
        queries = QUERIES * size * step.tokens * facts.dims["q_rows"] / layout.tp
        return rows + scores + queries
    return 0.0


def _gated_width(work: ModelWork) -> float:
    """Bytes alive for each column of a gated feed-forward: SiTU is computed in fp32."""
    if getattr(work.spec.config, "situ", None) is not None:
        return GATED * _FP32
    return PLAIN_GATED * work.table.element_bytes


def _latent_bytes(work: ModelWork, state: LatentState, layout: Layout, step: StepShape) -> float:
    """Queries, the context's rows, and the worst moment of three: scores, keys and values of the
    first block; those of a later one beside the last block's shares; the making of its keys and
    values while the last block's are still there.
    """
    size, dims = work.table.element_bytes, work.facts.dims
    heads = work.facts.axes["heads"].pieces / layout.tp
    widths = (dims["q_rows"] + dims["value_rows"]) / layout.tp
    first = min(step.context, CONTEXT_ROWS)
    second = min(step.context - first, CONTEXT_ROWS)
    each = step.span * heads
    block = max(
        (SCORES * each + widths) * first,
        each * first + (SCORES * each + widths) * second,
        2 * each * first + (first + 2 * second) * widths if second else 0.0,
    )
    queries = step.tokens * widths * (size + _FP32)
    return _FP32 * block + queries + step.context * state.width * size


def _routed_bytes(work: ModelWork, kind: LayerKind, layout: Layout, step: StepShape) -> float:
    """The sum in fp32 twice, one expert's matrices, and the rows of the fullest expert."""
    dims, size = work.facts.dims, work.table.element_bytes
    width, inner = dims["expert_width"] / layout.expert_tp, dims["latent"]
    tokens = step.tokens * layout.dp
    fullest = min(tokens, _FULLEST * tokens * work.chosen / work.facts.num_experts + 1)
    narrow = any(m.narrow for m in kind.matmuls if m.is_expert)
    matrices = width * inner * (3 * size + DEQUANTISED) if narrow else 0.0
    rows = fullest * (_gated_width(work) * width + 2 * inner * (size + _FP32))
    return tokens * inner * (size + 2 * _FP32) + matrices + rows


def encoder_bytes(work: ModelWork, patches: int) -> int:
    """Returns the most bytes alive while one image of so many patches is encoded: in a block, or
    while the table of positions is resampled.
    """
    vision = work.vision
    if vision is None:
        return 0
    per_patch = PATCH_ATTENTION * vision.attention_width + PATCH_HIDDEN * vision.hidden
    table = work.facts.dims["vision_rows"] * work.facts.dims["vision_columns"] * vision.hidden
    resampling = _FP32 * (table + 2 * patches * vision.hidden)
    return max(resampling, patches * per_patch * work.table.element_bytes // 2)
