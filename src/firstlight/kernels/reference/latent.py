"""Owns the plain PyTorch forms of attention over a paged cache of latent rows.

A row holds a latent c, from which every head's keys and values follow, and a key part s that all
heads share (arXiv:2405.04434). It knows no layer and no allocator.

Shape letters: T tokens of the step, N heads, W row width, C latent width (the first channels of a
row), P pages, S slots of a page, B sequences, X context of one sequence, H key channels that come
from the latent, V value channels, E =
C + 2 what a query carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.kernels.carry import carried, new_carry
from firstlight.kernels.reference.running_softmax import BlockOf, Sight, attend_span
from firstlight.kernels.reference.spans import PagedSpan, Segment, paged_spans
from firstlight.kernels.reference.wide import wide


class CachedRows(NamedTuple):
    """Spans whose rows, `width` channels each, are in the pages; `at` gives the rows [X, W] of a
    block of a span's context in the dtype to compute in.
    """

    spans: Sequence[PagedSpan]
    width: int
    at: Callable[[PagedSpan, slice], Tensor]


def latent_attention(
    q_TNW: Tensor,
    rows_TW: Tensor,
    rows_PSW: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    value_width: int,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Write the new rows into the pages, then attend with rows as keys and latents as values.

    `q_TNW` are absorbed queries: multiplied by the keys' part of the expansion. Returns the mixed
    latents [T, N, C], C = `value_width`. Changes `rows_PSW` in place; spans, pages, window and
    errors are those of `paged_attention`.
    """
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(rows_TW))
    rows = write_rows(spans, rows_TW, rows_PSW)
    return attend_absorbed(q_TNW, rows, scale, value_width, Sight(window, sinks))


def segment_latent_attention(
    q_TNW: Tensor,
    rows_TW: Tensor | None,
    rows_PSW: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    firsts_B: Tensor,
    lasts_B: Tensor,
    table_BP: Tensor,
    scale: float,
    carry_TNE: Tensor,
) -> Tensor:
    """Attend a segment of each context as `segment_attention` does, with latents."""
    segment = Segment(firsts_B, lasts_B, rows_TW is not None)
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(
        starts_B1, contexts_B, table_BP, cache=cache, tokens=len(q_TNW), segment=segment
    )
    rows = write_rows(spans, rows_TW, rows_PSW, dtype=q_TNW.dtype)
    add_absorbed(q_TNW, rows, scale, carry_TNE, Sight())
    return carry_TNE


def expanded_latent_attention(
    q_TNK: Tensor,
    rows_TW: Tensor,
    expansion_NOC: Tensor,
    rows_PSW: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    scale: float,
) -> Tensor:
    """Write the new rows, expand each context block to keys and values per head, and attend.

    `expansion_NOC` [N, H + V, C] turns a latent into a head's keys and values; queries [T, N, K]
    have H channels for the former and K - H for the shared part. Returns [T, N, V].
    """
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(rows_TW))
    rows = write_rows(spans, rows_TW, rows_PSW)
    return attend_expanded(q_TNK, rows, scale, expansion_NOC)


def attend_absorbed(
    q_TNW: Tensor, rows: CachedRows, scale: float, value_width: int, sight: Sight
) -> Tensor:
    """Attend with cached rows as keys and their first channels as values: [T, N, C]."""
    carry_TNE = new_carry(q_TNW, value_width)
    add_absorbed(q_TNW, rows, scale, carry_TNE, sight)
    return carried(carry_TNE, q_TNW.dtype)


def add_absorbed(
    q_TNW: Tensor, rows: CachedRows, scale: float, carry_TNE: Tensor, sight: Sight
) -> None:
    """Attend what the spans say on top of what queries carry, which is changed in place."""
    value_width = carry_TNE.shape[2] - 2
    for span in rows.spans:

        def shared(block: slice, span: PagedSpan = span) -> tuple[Tensor, Tensor]:
            part_1XW = rows.at(span, block).unsqueeze(0)
            return part_1XW, part_1XW[..., :value_width]

        # All heads share the rows: they are queries of one key head.
        _attend(q_TNW, span, scale, shared, carry_TNE, kv_heads=1, sight=sight)


def attend_expanded(q_TNK: Tensor, rows: CachedRows, scale: float, expansion_NOC: Tensor) -> Tensor:
    """Attend with keys and values expanded from cached rows, in the rows' dtype: [T, N, V]."""
    heads, width, latent = expansion_NOC.shape
    own = q_TNK.shape[2] - (rows.width - latent)
    carry_TNE = new_carry(q_TNK, width - own)
    for span in rows.spans:

        def expanded(block: slice, span: PagedSpan = span) -> tuple[Tensor, Tensor]:
            part_XW = rows.at(span, block)
            both_NXO = part_XW[:, :latent] @ expansion_NOC.to(part_XW.dtype).transpose(1, 2)
            shared_NXS = part_XW[:, latent:].expand(heads, -1, -1)
            return torch.cat((both_NXO[..., :own], shared_NXS), -1), both_NXO[..., own:]

        _attend(q_TNK, span, scale, expanded, carry_TNE, kv_heads=heads, sight=Sight())
    return carried(carry_TNE, q_TNK.dtype)


def write_rows(
    spans: Sequence[PagedSpan],
    rows_TW: Tensor | None,
    rows_PSW: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> CachedRows:
    """Write the new rows of every span, if there are any; return how all are read, in `dtype` or
    that of the new rows.
    """
    if rows_TW is not None:
        for span in spans:
            rows_PSW[span.places] = rows_TW[span.begin : span.end].to(rows_PSW.dtype)
        dtype = rows_TW.dtype

    def at(span: PagedSpan, block: slice) -> Tensor:
        page_ids, inside = span.pages_at(block)
        return rows_PSW[page_ids].flatten(0, 1)[inside].to(dtype)

    return CachedRows(spans, rows_PSW.shape[2], at)


def _attend(
    q_TNK: Tensor,
    span: PagedSpan,
    scale: float,
    block_of: BlockOf,
    carry_TNE: Tensor,
    *,
    kv_heads: int,
    sight: Sight,
) -> None:
    own = slice(span.begin, span.end)
    attend_span(
        wide(q_TNK[own]) * scale,
        span.context - 1,
        block_of,
        carry_TNE=carry_TNE[own],
        kv_heads=kv_heads,
        keys=span.keys,
        sight=sight,
    )
