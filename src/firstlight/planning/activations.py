"""Owns what one step needs beside weights and caches: live values of the widest moment of a layer.

The coefficients were counted on the plain forms of the kernels, which every platform can fall back
to, as bytes alive at once (tests/planning/test_activations.py counts them again); where it is said
which operations have a native kernel, `fast_activations` counts those. Knows no engine; T are
tokens of a step, s bytes of a value in the compute type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from firstlight.planning.fast_activations import (
    fast_attention_values,
    fast_gated_values,
    fast_routed_values,
)
from firstlight.planning.work import LayerKind, ModelWork
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import GroupedQueryState, LatentState, RecurrentState

_FP32 = 4
# fp32 values alive at once: of each channel in the delta rule; of each score of a block of context;
# of each column of a gated feed-forward; of each channel of each row in a mix of residuals.
DELTA_RULE, SCORES, GATED, MIX = 16.6, 3.0, 6.0, 2.15
# The same of a column where the gate is SiLU, in the compute type.
PLAIN_GATED = 3.5
# Tokens and context positions whose scores attention holds at once.
QUERY_ROWS, CONTEXT_ROWS = 256, 2048
# Rows that each of these tokens has in fp32 at once: queries by head, what they carry, sums.
CARRIED = 3
# Bytes of an expert's matrix while its codes are looked up, beside the values in compute type.
DEQUANTISED = 20
# Copies of the logits that a choice at random makes: adjusted ones, and their exponentials.
SAMPLING_COPIES = 2
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


def activation_bytes(
    work: ModelWork, layout: Layout, step: StepShape, native: Collection[str] = ()
) -> int:
    """Returns the most bytes alive in a forward pass of one rank, logits and encoder left out.

    The carry and a layer's input, plain and normed, stay throughout; on top comes the widest of a
    layer's moments, or a second carry where a snapshot is taken. `native` names the operations
    that native kernels compute.
    """
    values = step.tokens * work.table.element_bytes
    widest = max(
        max({**moments_of(work, kind, layout, step), **fast}.values())
        for kind in work.kinds
        for fast in [fast_moments(work, kind, layout, step, native)]
    )
    return values * (work.carry + 2 * work.hidden) + int(max(widest, values * work.carry))


def step_bytes(
    work: ModelWork, layout: Layout, step: StepShape, native: Collection[str] = ()
) -> int:
    """Returns the most bytes alive in a step of a rank that has layers and head: in the forward
    pass, or while logits are there, beside the carry of all tokens.
    """
    carried = step.tokens * work.carry * work.table.element_bytes
    forward = activation_bytes(work, layout, step, native)
    sampling = SAMPLING_COPIES * step.sequences * work.vocab * _FP32
    return max(forward, carried + logits_bytes(work, step.sequences) + sampling)


def logits_bytes(work: ModelWork, sequences: int) -> int:
    """Returns the bytes of the logits of a step: as they come, and in fp32 where that is another
    type.
    """
    size = work.table.element_bytes
    return sequences * work.vocab * (size + (_FP32 if size != _FP32 else 0))


def fast_moments(
    work: ModelWork, kind: LayerKind, layout: Layout, step: StepShape, native: Collection[str]
) -> Mapping[str, float]:
    """Returns the bytes alive in those parts of a layer that native kernels compute, by part."""
    dims = work.facts.dims
    values = {"attention": fast_attention_values(work, kind, layout, native)}
    if work.bank_rows:
        values["mix"] = float(work.hidden) if "residual_mix" in native else None
    if kind.has_experts:
        shared = fast_gated_values(work, dims.get("shared_ffn", 0) / layout.tp, native)
        values["shared experts"] = None if shared is None else shared + work.hidden
        values["routed experts"] = fast_routed_values(work, native)
    else:
        values["feed-forward"] = fast_gated_values(work, dims["ffn"] / layout.tp, native)
    size = step.tokens * work.table.element_bytes
    return {part: size * one for part, one in values.items() if one is not None}


def moments_of(
    work: ModelWork, kind: LayerKind, layout: Layout, step: StepShape
) -> Mapping[str, float]:
    """Returns the bytes alive in each part of a layer in plain form, by part."""
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
    state = kind.state
    if isinstance(state, RecurrentState):
        channels = state.heads / layout.tp * state.key_dim
        return DELTA_RULE * _FP32 * step.tokens * channels
    if isinstance(state, LatentState):
        form = _absorbed_bytes if kind.absorbs else _latent_bytes
        return form(work, state, layout, step)
    if isinstance(state, GroupedQueryState):
        return _grouped_bytes(work, state, layout, step)
    return 0.0


def _scores_bytes(step: StepShape, heads: float, sharing: float) -> float:
    """Scores, their shares and what lies between them of a block of context, for so many tokens of
    a span at once, and a mask where some of them do not see all of it; `sharing` heads have one
    mask.
    """
    whole = step.span // QUERY_ROWS * QUERY_ROWS
    found = []
    for rows, end in ((min(QUERY_ROWS, whole), whole), (step.span - whole, step.span)):
        last = step.context - step.span + end
        block = min(last, CONTEXT_ROWS)
        masked = 0.0 if block <= last - rows + 1 else sharing
        found.append(rows * block * (SCORES * _FP32 * heads + masked))
    return max(found)


def _grouped_bytes(
    work: ModelWork, state: GroupedQueryState, layout: Layout, step: StepShape
) -> float:
    """Scores of a block, its keys and values as gathered and by head, and of each token queries,
    scaled queries, new keys and values and what it carries from block to block.
    """
    size, rows = work.table.element_bytes, min(step.span, QUERY_ROWS)
    queries = work.facts.dims["q_rows"] / layout.tp
    heads = queries / state.head_dim
    keys = 2 * state.local_heads(layout.tp) * state.head_dim
    block = min(step.context, CONTEXT_ROWS) * keys * (size + (_FP32 if size != _FP32 else size))
    tokens = step.tokens * ((queries + keys) * size + (queries + 2 * heads) * _FP32)
    carried = step.span * queries * _FP32 + CARRIED * rows * queries * _FP32
    return (
        _scores_bytes(step, heads, heads / state.local_heads(layout.tp)) + block + tokens + carried
    )


def _gated_width(work: ModelWork) -> float:
    """Bytes alive for each column of a gated feed-forward: SiTU is computed in fp32."""
    if getattr(work.spec.config, "situ", None) is not None:
        return GATED * _FP32
    return PLAIN_GATED * work.table.element_bytes


def _latent_bytes(work: ModelWork, state: LatentState, layout: Layout, step: StepShape) -> float:
    """The absorbed form up to the span it is the cheaper one for, else the expanded one."""
    dims, heads = work.facts.dims, work.facts.axes["heads"].pieces
    latent, own = dims["kv_rank"], dims["kv_rows"] / heads
    saved = latent + state.width - (dims["q_rows"] + dims["value_rows"]) / heads
    if saved <= 0 or step.span <= latent * own / saved:
        return _absorbed_bytes(work, state, layout, step)
    return _expanded_bytes(work, state, layout, step)


def _expanded_bytes(work: ModelWork, state: LatentState, layout: Layout, step: StepShape) -> float:
    """Scores of a block and every head's keys and values of it; of each token queries, scaled
    queries, its row and what it carries from block to block.
    """
    size, dims = work.table.element_bytes, work.facts.dims
    heads = work.facts.axes["heads"].pieces / layout.tp
    queries, values = dims["q_rows"] / layout.tp, dims["value_rows"] / layout.tp
    made = (queries + dims["kv_rows"] / layout.tp) * size
    wide = (queries + values) * _FP32 if size != _FP32 else 0.0
    block = min(step.context, CONTEXT_ROWS) * (made + wide)
    tokens = step.tokens * ((queries + state.width) * size + (values + 2 * heads) * _FP32)
    return _scores_bytes(step, heads, 1.0) + block + tokens + step.span * queries * _FP32


def _absorbed_bytes(work: ModelWork, state: LatentState, layout: Layout, step: StepShape) -> float:
    """Scores of a block, or two of them and sums of latents; of each token queries, absorbed ones,
    the same scaled and by head, its row, and twice what it carries.
    """
    size, dims = work.table.element_bytes, work.facts.dims
    rows = min(step.span, QUERY_ROWS)
    heads = work.facts.axes["heads"].pieces / layout.tp
    absorbed, carried = heads * state.width, heads * (dims["kv_rank"] + 2)
    tokens = step.tokens * (dims["q_rows"] / layout.tp + state.width + absorbed) * size
    tokens += (step.tokens * carried + step.span * absorbed) * _FP32
    by_head = rows * (absorbed + carried) * _FP32
    block = 2 * min(step.context, CONTEXT_ROWS) * state.width * size
    scores = _scores_bytes(step, heads, heads)
    sums = scores * 2 / SCORES + rows * heads * dims["kv_rank"] * _FP32
    return tokens + by_head + block + max(scores, sums)


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
