"""Owns the plain PyTorch forms of attention over INT8 caches, and how values become INT8.

Knows no layer and no allocator. Values that share a scale keep 8 bits each: x is q * s, q a whole
number within 127, s their greatest magnitude / 127 in fp16. A token is written once and always read
back in INT8, so that chunks, cache hits and preemption change nothing. The context is turned back
to floats a block at a time, never as a whole. Pages of FP8 (e4m3, within 448) are taken in their
place: the type of a page says which.

Shape letters: T tokens of the step, N query heads, K key/value heads, H head channels, P pages, S
slots of a page, B sequences, X context of a block, M queries of one key/value head, W row width, G
scales of a row, C latent width, V value channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.carry import carried, new_carry
from firstlight.kernels.reference.latent import (
    CachedRows,
    add_absorbed,
    attend_absorbed,
    attend_expanded,
)
from firstlight.kernels.reference.running_softmax import Sight, attend_span
from firstlight.kernels.reference.spans import PagedSpan, Segment, paged_spans
from firstlight.kernels.reference.wide import wide
from firstlight.sharding.state_spec import INT8_GROUP

# The greatest code of a type.
MOST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def quantised(x: Tensor, group: int, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return x in INT8 or FP8, and the fp16 scales of each `group` values of its last dimension.

    An error is at most half a scale in INT8, and 1/16 of a value or 2^-10 of a scale in FP8; 4e-6
    and 1.4e-5 more where the scale is below the normal numbers of fp16. Values that are not finite
    give scales that are not, so that whoever reads them finds out.
    """
    most = MOST[dtype]
    width = x.shape[-1]
    padded = functional.pad(wide(x), (0, -width % group))
    padded = padded.reshape(*x.shape[:-1], -1, group)
    scales = (padded.abs().amax(-1) / most).half()
    steps = scales.to(padded.dtype).unsqueeze(-1)
    codes = torch.where(steps == 0, 0, padded / steps).nan_to_num(0).clamp(-most, most)
    if dtype == torch.int8:
        codes = codes.round()
    return codes.to(dtype).flatten(-2)[..., :width], scales


def dequantised(q: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the float32 values that codes and scales [..., ceil(width / group)] stand for."""
    return q.float() * scales.float().repeat_interleave(group, -1)[..., : q.shape[-1]]


def spread(x: Tensor) -> Tensor:
    """Return x, in float32 at least, turned so that each channel is spread over all of a run.

    The runs are the greatest power of two that divides the width, the matrix is Hadamard's (as in
    arXiv:2404.00456), and orthogonal: products of two spread vectors are those of the vectors.
    """
    size = x.shape[-1] & -x.shape[-1]
    runs, half = wide(x), 1
    while half < size:
        low, high = runs.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        runs = torch.stack((low + high, low - high), -2)
        half *= 2
    out: Tensor = runs.reshape(x.shape) * float(size) ** -0.5
    return out


def int8_paged_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    keys_PKSH: Tensor,
    key_scales_PKS: Tensor,
    values_PKSH: Tensor,
    value_scales_PKS: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Write k and v into the pages in INT8, then attend as `paged_attention` does.

    Keys are kept `spread`, and queries meet them so: a few channels of keys are much larger than
    the rest and would set the scale of all. A scale belongs to one token and head. Changes pages
    and scales in place; raises as `paged_attention` does, and nothing is written then.
    """
    cache = (keys_PKSH.shape[0], keys_PKSH.shape[2])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(q_TNH))
    caches = ((keys_PKSH, key_scales_PKS), (values_PKSH, value_scales_PKS))
    carry_TNE = new_carry(q_TNH, v_TKH.shape[2])
    q_TNH = wide(spread(q_TNH)) * scale
    _write_heads(spans, (k_TKH, v_TKH), caches)
    for span in spans:
        _attend_heads(span, q_TNH, caches, carry_TNE, Sight(window, sinks))
    return carried(carry_TNE, v_TKH.dtype)


def int8_segment_attention(
    q_TNH: Tensor,
    k_TKH: Tensor | None,
    v_TKH: Tensor | None,
    keys_PKSH: Tensor,
    key_scales_PKS: Tensor,
    values_PKSH: Tensor,
    value_scales_PKS: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    firsts_B: Tensor,
    lasts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    carry_TNE: Tensor,
) -> Tensor:
    """Attend a segment of each context as `segment_attention` does, in INT8."""
    segment = Segment(firsts_B, lasts_B, k_TKH is not None)
    cache = (keys_PKSH.shape[0], keys_PKSH.shape[2])
    spans = paged_spans(
        starts_B1, contexts_B, table_BP, cache=cache, tokens=len(q_TNH), segment=segment
    )
    caches = ((keys_PKSH, key_scales_PKS), (values_PKSH, value_scales_PKS))
    if k_TKH is not None and v_TKH is not None:
        _write_heads(spans, (k_TKH, v_TKH), caches)
    q_TNH = wide(spread(q_TNH)) * scale
    for span in spans:
        _attend_heads(span, q_TNH, caches, carry_TNE, Sight())
    return carry_TNE


def int8_latent_attention(
    q_TNW: Tensor,
    rows_TW: Tensor,
    rows_PSW: Tensor,
    scales_PSG: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    value_width: int,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Write the new rows in INT8, then attend as `latent_attention` does.

    A scale belongs to one token and INT8_GROUP values of its row.
    """
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(rows_TW))
    rows = _write_rows(spans, rows_TW, (rows_PSW, scales_PSG), rows_TW.dtype)
    return attend_absorbed(q_TNW, rows, scale, value_width, Sight(window, sinks))


def int8_segment_latent_attention(
    q_TNW: Tensor,
    rows_TW: Tensor | None,
    rows_PSW: Tensor,
    scales_PSG: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    firsts_B: Tensor,
    lasts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    carry_TNE: Tensor,
) -> Tensor:
    """Attend a segment of each context as `segment_attention` does, with INT8 latents."""
    segment = Segment(firsts_B, lasts_B, rows_TW is not None)
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(
        starts_B1, contexts_B, table_BP, cache=cache, tokens=len(q_TNW), segment=segment
    )
    rows = _write_rows(spans, rows_TW, (rows_PSW, scales_PSG), q_TNW.dtype)
    add_absorbed(q_TNW, rows, scale, carry_TNE, Sight())
    return carry_TNE


def int8_expanded_latent_attention(
    q_TNK: Tensor,
    rows_TW: Tensor,
    expansion_NOC: Tensor,
    rows_PSW: Tensor,
    scales_PSG: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
) -> Tensor:
    """Write the new rows in INT8, then attend as `expanded_latent_attention` does."""
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(rows_TW))
    rows = _write_rows(spans, rows_TW, (rows_PSW, scales_PSG), rows_TW.dtype)
    return attend_expanded(q_TNK, rows, scale, expansion_NOC)


def _write_rows(
    spans: Sequence[PagedSpan],
    rows_TW: Tensor | None,
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> CachedRows:
    """Write the new rows of every span, if there are any; return how all are read, in fp32 or
    wider.
    """
    rows_PSW, scales_PSG = caches
    if rows_TW is not None:
        whole_TW, scales_TG = quantised(rows_TW, INT8_GROUP, rows_PSW.dtype)
        for span in spans:
            _bytes(rows_PSW)[span.places] = _bytes(whole_TW[span.begin : span.end])
            scales_PSG[span.places] = scales_TG[span.begin : span.end].to(scales_PSG.dtype)
    wider = torch.promote_types(dtype, torch.float32)

    def at(span: PagedSpan, block: slice) -> Tensor:
        page_ids, inside = span.pages_at(block)
        chosen = (_bytes(rows_PSW)[page_ids], scales_PSG[page_ids])
        rows_XW, scales_XG = (part.flatten(0, 1)[inside] for part in chosen)
        return dequantised(rows_XW.view(rows_PSW.dtype), scales_XG, INT8_GROUP).to(wider)

    return CachedRows(spans, rows_PSW.shape[2], at)


HeadCaches = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def _write_heads(
    spans: Sequence[PagedSpan], new: tuple[Tensor, Tensor], caches: HeadCaches
) -> None:
    """Write keys, spread, and values in the type of their pages."""
    for x_TKH, (pages_PKSH, scales_PKS) in zip((spread(new[0]), new[1]), caches, strict=True):
        whole_TKH, scales_TK1 = quantised(x_TKH, x_TKH.shape[-1], pages_PKSH.dtype)
        for span in spans:
            page_ids, slot_ids = span.places
            _bytes(pages_PKSH)[page_ids, :, slot_ids] = _bytes(whole_TKH[span.begin : span.end])
            scales_PKS[page_ids, :, slot_ids] = scales_TK1[span.begin : span.end, :, 0].to(
                scales_PKS.dtype
            )


def _attend_heads(
    span: PagedSpan, q_TNH: Tensor, caches: HeadCaches, carry_TNE: Tensor, sight: Sight
) -> None:
    def block_of(block: slice) -> tuple[Tensor, Tensor]:
        keys_KXH, values_KXH = (_heads(*cache, span, block) for cache in caches)
        return keys_KXH, values_KXH

    own = slice(span.begin, span.end)
    attend_span(
        q_TNH[own],
        span.context - 1,
        block_of,
        carry_TNE=carry_TNE[own],
        kv_heads=caches[0][0].shape[1],
        keys=span.keys,
        sight=sight,
    )


def _heads(pages_PKSH: Tensor, scales_PKS: Tensor, span: PagedSpan, block: slice) -> Tensor:
    """Return the keys or values [K, X, H] of a block of the context."""
    page_ids, inside = span.pages_at(block)
    whole_KXH = _bytes(pages_PKSH)[page_ids].transpose(0, 1).flatten(1, 2)[:, inside]
    scales_KX1 = scales_PKS[page_ids].transpose(0, 1).flatten(1, 2)[:, inside].unsqueeze(-1)
    return whole_KXH.view(pages_PKSH.dtype).float() * scales_KX1.float()


def _bytes(codes: Tensor) -> Tensor:
    """Return the same memory as INT8: devices move bytes that cannot index FP8."""
    return codes.view(torch.int8)
