"""Owns the plain PyTorch forms of attention over a paged cache of latent rows.

A row holds a latent c, from which every head's keys and values follow, and a key part s that all
heads share (arXiv:2405.04434). It knows no layer and no allocator.

Shape letters: T tokens of the step, N heads, W row width, C latent width (the first channels of a
row), P pages, S slots of a page, B sequences, X context of one sequence, H key channels that come
from the latent, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.kernels.reference.spans import PagedSpan, paged_spans
from firstlight.kernels.reference.wide import wide

# Context rows whose keys, values and scores are held at once.
CONTEXT_ROWS = 2048


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
) -> Tensor:
    """Write the new rows into the pages, then attend with rows as keys and latents as values.

    `q_TNW` are absorbed queries: multiplied by the keys' part of the expansion. Returns the mixed
    latents [T, N, C], C = `value_width`. Changes `rows_PSW` in place; spans, pages and errors are
    those of `paged_attention`.
    """
    rows = _written(rows_TW, rows_PSW, starts_B1, contexts_B, table_BP)
    return attend_absorbed(q_TNW, rows, scale, value_width)


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
    rows = _written(rows_TW, rows_PSW, starts_B1, contexts_B, table_BP)
    return attend_expanded(q_TNK, rows, scale, expansion_NOC)


def attend_absorbed(q_TNW: Tensor, rows: CachedRows, scale: float, value_width: int) -> Tensor:
    """Attend with cached rows as keys and their first channels as values: [T, N, C]."""
    out_TNC = q_TNW.new_empty(*q_TNW.shape[:2], value_width)
    for span in rows.spans:

        def shared(block: slice, span: PagedSpan = span) -> tuple[Tensor, Tensor]:
            part_1XW = rows.at(span, block).unsqueeze(0)
            return part_1XW, part_1XW[..., :value_width]

        part_TNW = q_TNW[span.begin : span.end]
        out_TNC[span.begin : span.end] = _attend_blocks(part_TNW, span.context, scale, shared)
    return out_TNC


def attend_expanded(q_TNK: Tensor, rows: CachedRows, scale: float, expansion_NOC: Tensor) -> Tensor:
    """Attend with keys and values expanded from cached rows, in the rows' dtype: [T, N, V]."""
    latent = expansion_NOC.shape[2]
    own = q_TNK.shape[2] - (rows.width - latent)
    out_TNV = q_TNK.new_empty(*q_TNK.shape[:2], expansion_NOC.shape[1] - own)
    for span in rows.spans:

        def expanded(block: slice, span: PagedSpan = span) -> tuple[Tensor, Tensor]:
            part_XW = rows.at(span, block)
            both_NXO = part_XW[:, :latent] @ expansion_NOC.to(part_XW.dtype).transpose(1, 2)
            shared_NXS = part_XW[:, latent:].expand(len(expansion_NOC), -1, -1)
            return torch.cat((both_NXO[..., :own], shared_NXS), -1), both_NXO[..., own:]

        part_TNK = q_TNK[span.begin : span.end]
        out_TNV[span.begin : span.end] = _attend_blocks(part_TNK, span.context, scale, expanded)
    return out_TNV


def _written(
    rows_TW: Tensor, rows_PSW: Tensor, starts_B1: Tensor, contexts_B: Tensor, table_BP: Tensor
) -> CachedRows:
    """Write the new rows of every sequence; return how all are read."""
    cache = (rows_PSW.shape[0], rows_PSW.shape[1])
    spans = paged_spans(starts_B1, contexts_B, table_BP, cache=cache, tokens=len(rows_TW))
    for span in spans:
        rows_PSW[span.places] = rows_TW[span.begin : span.end].to(rows_PSW.dtype)

    def at(span: PagedSpan, block: slice) -> Tensor:
        page_ids, inside = span.pages_at(block)
        return rows_PSW[page_ids].flatten(0, 1)[inside].to(rows_TW.dtype)

    return CachedRows(spans, rows_PSW.shape[2], at)


def _attend_blocks(
    q_TNK: Tensor, context: int, scale: float, block_of: Callable[[slice], tuple[Tensor, Tensor]]
) -> Tensor:
    """Attend T last tokens over a context, a block of it at a time: no score matrix is whole.

    `block_of` gives keys [N or 1, X, K] and values [N or 1, X, V] of a block. The running softmax
    keeps for each query the greatest score, the sum of exponentials and the mixed values (Milakov
    and Gimelshein, arXiv:1805.02867).
    """
    q_NTK = wide(q_TNK).transpose(0, 1) * scale
    tokens = q_NTK.shape[1]
    rows_T1 = torch.arange(context - tokens, context, device=q_TNK.device).unsqueeze(1)
    best_NT1 = q_NTK.new_full((*q_NTK.shape[:2], 1), -torch.inf)
    total_NT1 = torch.zeros_like(best_NT1)
    mixed_NTV = q_NTK.new_zeros(())
    for first in range(0, context, CONTEXT_ROWS):
        last = min(context, first + CONTEXT_ROWS)
        keys_NXK, values_NXV = (wide(part) for part in block_of(slice(first, last)))
        scores_NTX = q_NTK @ keys_NXK.transpose(1, 2)
        if last > context - tokens:
            columns_1X = torch.arange(first, last, device=q_TNK.device).unsqueeze(0)
            scores_NTX = scores_NTX.masked_fill(columns_1X > rows_T1, -torch.inf)
        # The first block holds position 0, which every query sees: `best` is finite from there on.
        higher_NT1 = torch.maximum(best_NT1, scores_NTX.amax(-1, keepdim=True))
        faded_NT1 = (best_NT1 - higher_NT1).exp()
        shares_NTX = (scores_NTX - higher_NT1).exp()
        total_NT1 = total_NT1 * faded_NT1 + shares_NTX.sum(-1, keepdim=True)
        mixed_NTV = mixed_NTV * faded_NT1 + shares_NTX @ values_NXV
        best_NT1 = higher_NT1
    return (mixed_NTV / total_NT1).transpose(0, 1).to(q_TNK.dtype)
