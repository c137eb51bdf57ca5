"""Owns the plain PyTorch form of attention, over a paged cache and within a batch.

It is the meaning of these operations; it knows no scheduler, allocator or layer.

Shape letters: T tokens of the step, N query heads, K key/value heads, H head channels, P pages
(of the cache, or of the longest sequence in a table), S slots of a page, B sequences, C context.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.reference.dense import rotary
from firstlight.kernels.reference.spans import check_spans, paged_spans

QUERY_ROWS = 512


def paged_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Write k and v into the pages, then attend causally over each sequence's whole context.

    Tokens of B sequences stand back to back: sequence b owns [starts[b], starts[b + 1]), its last
    tokens, and has contexts[b] tokens in the cache after the call. Position p lives in page
    table[b, p // S], slot p % S. With `window`, a token at position p sees positions > p - window.
    Changes `keys_PKSH` and `values_PKSH` in place. Raises IndexError for a page outside the cache
    and ValueError for starts and contexts that contradict each other; nothing is written then.
    """
    cache = (keys_PKSH.shape[0], keys_PKSH.shape[2])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=q_TNH.shape[0])
    out_TNH = torch.empty_like(q_TNH)
    for span in spans:
        own = slice(span.begin, span.end)
        page_ids, slot_ids = span.places
        keys_PKSH[page_ids, :, slot_ids] = k_TKH[own]
        values_PKSH[page_ids, :, slot_ids] = v_TKH[own]
        k_KCH = _gathered(keys_PKSH, span.page_ids, span.context)
        v_KCH = _gathered(values_PKSH, span.page_ids, span.context)
        out_TNH[own] = _attend(q_TNH[own], k_KCH, v_KCH, scale, window)
    return out_TNH


def rotary_paged_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    positions_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Rotate q and k, then attend over the paged cache; `paged_attention` says the rest."""
    q_TNH, k_TKH = rotary(q_TNH, k_TKH, positions_T, cos_PR, sin_PR)
    return paged_attention(
        q_TNH,
        k_TKH,
        v_TKH,
        keys_PKSH,
        values_PKSH,
        starts_B1,
        contexts_B,
        table_BP,
        scale,
        window,
    )


def attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    starts_B1: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend causally within each sequence of the batch; no cache, differentiable."""
    starts = starts_B1.tolist()
    check_spans(starts, None, q_TNH.shape[0])
    parts = [
        _attend(
            q_TNH[begin:end],
            k_TKH[begin:end].transpose(0, 1),
            v_TKH[begin:end].transpose(0, 1),
            scale,
            window,
        )
        for begin, end in pairwise(starts)
        if end > begin
    ]
    return torch.cat(parts) if parts else q_TNH * 1.0


def _attend(
    q_TNH: Tensor, k_KCH: Tensor, v_KCH: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend T last tokens over C positions, some rows at a time: no score matrix is whole."""
    tokens, context = q_TNH.shape[0], k_KCH.shape[1]
    parts = []
    for begin in range(0, tokens, QUERY_ROWS):
        end = min(tokens, begin + QUERY_ROWS)
        last = context - tokens + end
        first = 0 if window is None else max(0, context - tokens + begin - window + 1)
        rows = torch.arange(last - (end - begin), last, device=q_TNH.device).unsqueeze(1)
        columns = torch.arange(first, last, device=q_TNH.device).unsqueeze(0)
        seen = columns <= rows
        if window is not None:
            seen &= columns > rows - window
        out_NTH = functional.scaled_dot_product_attention(
            q_TNH[begin:end].transpose(0, 1).unsqueeze(0),
            k_KCH[:, first:last].unsqueeze(0),
            v_KCH[:, first:last].unsqueeze(0),
            attn_mask=seen,
            scale=scale,
            enable_gqa=q_TNH.shape[1] != k_KCH.shape[0],
        ).squeeze(0)
        parts.append(out_NTH.transpose(0, 1))
    return torch.cat(parts)


def _gathered(pages_PKSH: Tensor, page_ids: Tensor, context: int) -> Tensor:
    chosen = pages_PKSH[page_ids].transpose(0, 1)
    return chosen.reshape(chosen.shape[0], -1, chosen.shape[-1])[:, :context]
