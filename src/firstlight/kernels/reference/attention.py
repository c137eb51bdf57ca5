"""Owns the plain PyTorch form of attention, over a paged cache and within a batch.

It is the meaning of these operations; it knows no scheduler, allocator or layer.

Shape letters: T tokens of the step, N query heads, K key/value heads, H head channels, P pages
(of the cache, or of the longest sequence in a table), S slots of a page, B sequences, C context, X
positions of a block, E = H + 2 what a query carries.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from firstlight.kernels.carry import carried, new_carry
from firstlight.kernels.host_copy import on_host
from firstlight.kernels.reference.dense import rotary
from firstlight.kernels.reference.running_softmax import Sight, attend_all, attend_span
from firstlight.kernels.reference.spans import PagedSpan, Segment, check_spans, paged_spans
from firstlight.kernels.reference.wide import wide


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
    sinks: int = 0,
) -> Tensor:
    """Write k and v into the pages, then attend causally over each sequence's whole context.

    Tokens of B sequences stand back to back: sequence b owns [starts[b], starts[b + 1]), its last
    tokens, and has contexts[b] tokens in the cache after the call. Position p lives in page
    table[b, p // S], slot p % S. With `window`, a token at position p sees positions > p - window,
    and those below `sinks`. A block of the context is read at a time, so that neither keys nor
    scores are ever whole.
    Changes `keys_PKSH` and `values_PKSH` in place. Raises IndexError for a page outside the cache
    and ValueError for starts and contexts that contradict each other; nothing is written then.
    """
    cache = (keys_PKSH.shape[0], keys_PKSH.shape[2])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=q_TNH.shape[0])
    caches = (keys_PKSH, values_PKSH)
    carry_TNE = new_carry(q_TNH, v_TKH.shape[2])
    for span in spans:
        _write(span, (k_TKH, v_TKH), caches)
        _attend_pages(span, q_TNH, caches, scale, carry_TNE, Sight(window, sinks))
    return carried(carry_TNE, q_TNH.dtype)


def segment_attention(
    q_TNH: Tensor,
    k_TKH: Tensor | None,
    v_TKH: Tensor | None,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    firsts_B: Tensor,
    lasts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    carry_TNE: Tensor,
) -> Tensor:
    """Attend positions [firsts[b], lasts[b]) of each context, on top of what queries carry.

    `carry_TNE` begins as `new_carry`, is changed in place and returned. After the whole context,
    segment behind segment, `carried` gives the bits of `paged_attention`, if segments begin at
    multiples of CONTEXT_ROWS. Tables begin at position firsts[b]. New keys and values are written
    first, unless they are None; then tables must cover them too.
    """
    segment = Segment(firsts_B, lasts_B, k_TKH is not None)
    cache = (keys_PKSH.shape[0], keys_PKSH.shape[2])
    tokens = q_TNH.shape[0]
    spans = paged_spans(
        starts_B1, contexts_B, table_BP, cache=cache, tokens=tokens, segment=segment
    )
    for span in spans:
        if k_TKH is not None and v_TKH is not None:
            _write(span, (k_TKH, v_TKH), (keys_PKSH, values_PKSH))
        _attend_pages(span, q_TNH, (keys_PKSH, values_PKSH), scale, carry_TNE, Sight())
    return carry_TNE


def _write(span: PagedSpan, new: tuple[Tensor, ...], caches: tuple[Tensor, ...]) -> None:
    page_ids, slot_ids = span.places
    for x_TKH, pages_PKSH in zip(new, caches, strict=True):
        pages_PKSH[page_ids, :, slot_ids] = x_TKH[span.begin : span.end].to(pages_PKSH.dtype)


def _attend_pages(
    span: PagedSpan,
    q_TNH: Tensor,
    caches: tuple[Tensor, Tensor],
    scale: float,
    carry_TNE: Tensor,
    sight: Sight,
) -> None:
    def block_of(block: slice) -> tuple[Tensor, Tensor]:
        page_ids, inside = span.pages_at(block)
        keys_KXH, values_KXH = (
            pages[page_ids].transpose(0, 1).flatten(1, 2)[:, inside] for pages in caches
        )
        return keys_KXH, values_KXH

    own = slice(span.begin, span.end)
    attend_span(
        wide(q_TNH[own]) * scale,
        span.context - 1,
        block_of,
        carry_TNE=carry_TNE[own],
        kv_heads=caches[0].shape[1],
        keys=span.keys,
        sight=sight,
    )


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
    sinks: int = 0,
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
        sinks,
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
    starts = on_host(starts_B1).tolist()
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
    """Attend the T tokens of one sequence, with the bits of the paged form in fp32."""

    def block_of(block: slice) -> tuple[Tensor, Tensor]:
        return k_KCH[:, block], v_KCH[:, block]

    out_TNV = attend_all(wide(q_TNH) * scale, block_of, (len(k_KCH), v_KCH.shape[2]), Sight(window))
    return out_TNV.to(q_TNH.dtype)
