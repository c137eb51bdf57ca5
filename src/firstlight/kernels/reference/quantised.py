"""Owns the plain PyTorch forms of attention over INT8 caches, and how values become INT8.

Knows no layer and no allocator. Values that share a scale keep 8 bits each: x is q * s, q a whole
number within 127, s their greatest magnitude / 127 in fp16. A token is written once and always read
back in INT8, so that chunks, cache hits and preemption change nothing. The context is turned back
to floats a block at a time, never as a whole.

Shape letters: T tokens of the step, N query heads, K key/value heads, H head channels, P pages, S
slots of a page, B sequences, X context of a block, M queries of one key/value head, W row width, G
scales of a row, C latent width, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.reference.latent import CachedRows, attend_absorbed, attend_expanded
from firstlight.kernels.reference.spans import PagedSpan, paged_spans
from firstlight.kernels.reference.wide import wide
from firstlight.sharding.state_spec import INT8_GROUP

MOST = 127
# Context positions, and tokens of a step, whose scores are held at once.
CONTEXT_ROWS = 2048
QUERY_ROWS = 256


def quantised(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return x in INT8, and the fp16 scales of each `group` values of its last dimension.

    An error is at most half a scale, and 4e-6 more where the scale is below the normal numbers of
    fp16. Values that are not finite give scales that are not, so that
    whoever reads them finds out.
    """
    width = x.shape[-1]
    padded = functional.pad(wide(x), (0, -width % group))
    padded = padded.reshape(*x.shape[:-1], -1, group)
    scales = (padded.abs().amax(-1) / MOST).half()
    steps = scales.to(padded.dtype).unsqueeze(-1)
    whole = torch.where(steps == 0, 0, padded / steps).nan_to_num(0).round().clamp(-MOST, MOST)
    return whole.to(torch.int8).flatten(-2)[..., :width], scales


def dequantised(q: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the float32 values that INT8 and scales [..., ceil(width / group)] stand for."""
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
) -> Tensor:
    """Write k and v into the pages in INT8, then attend as `paged_attention` does.

    Keys are kept `spread`, and queries meet them so: a few channels of keys are much larger than
    the rest and would set the scale of all. A scale belongs to one token and head. Changes pages
    and scales in place; raises as `paged_attention` does, and nothing is written then.
    """
    cache = (keys_PKSH.shape[0], keys_PKSH.shape[2])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(q_TNH))
    caches = ((keys_PKSH, key_scales_PKS), (values_PKSH, value_scales_PKS))
    out_TNH = torch.empty_like(q_TNH)
    q_TNH, k_TKH = spread(q_TNH), spread(k_TKH)
    for x_TKH, (pages_PKSH, scales_PKS) in zip((k_TKH, v_TKH), caches, strict=True):
        whole_TKH, scales_TK1 = quantised(x_TKH, x_TKH.shape[-1])
        for span in spans:
            page_ids, slot_ids = span.places
            pages_PKSH[page_ids, :, slot_ids] = whole_TKH[span.begin : span.end]
            scales_PKS[page_ids, :, slot_ids] = scales_TK1[span.begin : span.end, :, 0].to(
                scales_PKS.dtype
            )

    for span in spans:
        for begin in range(span.begin, span.end, QUERY_ROWS):
            end = min(span.end, begin + QUERY_ROWS)
            last = span.context - (span.end - end)
            part_TNH = q_TNH[begin:end] * scale
            out_TNH[begin:end] = _attend(part_TNH, caches, span, last, window)
    return out_TNH


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
) -> Tensor:
    """Write the new rows in INT8, then attend as `latent_attention` does.

    A scale belongs to one token and INT8_GROUP values of its row.
    """
    rows = _written(rows_TW, (rows_PSW, scales_PSG), starts_B1, contexts_B, table_BP)
    return attend_absorbed(q_TNW, rows, scale, value_width)


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
    rows = _written(rows_TW, (rows_PSW, scales_PSG), starts_B1, contexts_B, table_BP)
    return attend_expanded(q_TNK, rows, scale, expansion_NOC)


def _written(
    rows_TW: Tensor,
    caches: tuple[Tensor, Tensor],
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
) -> CachedRows:
    """Write the new rows of every sequence in INT8; return how all are read, in fp32 or wider."""
    rows_PSW, scales_PSG = caches
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(rows_TW))
    whole_TW, scales_TG = quantised(rows_TW, INT8_GROUP)
    for span in spans:
        rows_PSW[span.places] = whole_TW[span.begin : span.end]
        scales_PSG[span.places] = scales_TG[span.begin : span.end].to(scales_PSG.dtype)

    def at(span: PagedSpan, block: slice) -> Tensor:
        page_ids, inside = span.pages_at(block)
        rows_XW, scales_XG = (part[page_ids].flatten(0, 1)[inside] for part in caches)
        return dequantised(rows_XW, scales_XG, INT8_GROUP).to(wide(rows_TW[:0]).dtype)

    return CachedRows(spans, rows_PSW.shape[2], at)


def _attend(
    q_TNH: Tensor,
    caches: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    span: PagedSpan,
    last: int,
    window: int | None,
) -> Tensor:
    """Attend T tokens, the newest at position `last` - 1, with a running softmax over blocks.

    The greatest score of a query stays -inf until a block holds a position it sees.
    """
    (tokens, heads, channels), kv_heads = q_TNH.shape, caches[0][0].shape[1]
    q_KMH = wide(q_TNH).view(tokens, kv_heads, -1, channels).transpose(0, 1).flatten(1, 2)
    rows = torch.arange(last - tokens, last, device=q_TNH.device)
    rows_M1 = rows.repeat_interleave(heads // kv_heads).unsqueeze(1)
    best_KM1 = q_KMH.new_full((*q_KMH.shape[:2], 1), -torch.inf)
    total_KM1, mixed_KMH = torch.zeros_like(best_KM1), torch.zeros_like(q_KMH)
    start = 0 if window is None else max(0, last - tokens - window + 1)
    for first in range(start, last, CONTEXT_ROWS):
        block = slice(first, min(last, first + CONTEXT_ROWS))
        keys_KXH, values_KXH = (_heads(*cache, span, block).to(q_KMH.dtype) for cache in caches)
        columns_1X = torch.arange(block.start, block.stop, device=q_TNH.device).unsqueeze(0)
        hidden_MX = columns_1X > rows_M1
        if window is not None:
            hidden_MX |= columns_1X <= rows_M1 - window
        scores_KMX = (q_KMH @ keys_KXH.transpose(1, 2)).masked_fill(hidden_MX, -torch.inf)
        higher_KM1 = torch.maximum(best_KM1, scores_KMX.amax(-1, keepdim=True))
        base_KM1 = higher_KM1.masked_fill(higher_KM1 == -torch.inf, 0)
        faded_KM1, shares_KMX = (best_KM1 - base_KM1).exp(), (scores_KMX - base_KM1).exp()
        total_KM1 = total_KM1 * faded_KM1 + shares_KMX.sum(-1, keepdim=True)
        mixed_KMH = mixed_KMH * faded_KM1 + shares_KMX @ values_KXH
        best_KM1 = higher_KM1
    out_KTGH = (mixed_KMH / total_KM1).view(kv_heads, tokens, -1, channels)
    return out_KTGH.transpose(0, 1).reshape(tokens, heads, channels).to(q_TNH.dtype)


def _heads(pages_PKSH: Tensor, scales_PKS: Tensor, span: PagedSpan, block: slice) -> Tensor:
    """Return the keys or values [K, X, H] of a block of the context."""
    page_ids, inside = span.pages_at(block)
    whole_KXH = pages_PKSH[page_ids].transpose(0, 1).flatten(1, 2)[:, inside]
    scales_KX1 = scales_PKS[page_ids].transpose(0, 1).flatten(1, 2)[:, inside].unsqueeze(-1)
    return whole_KXH.float() * scales_KX1.float()
