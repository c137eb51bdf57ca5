"""Owns the plain PyTorch forms of attention over a paged cache of latent rows.

A row holds a latent c, from which every head's keys and values follow, and a key part s that all
heads share (arXiv:2405.04434). It knows no layer and no allocator.

Shape letters: T tokens of the step, N heads, W row width, C latent width (the first channels of a
row), P pages, S slots of a page, B sequences, X context of one sequence, H key channels that come
from the latent, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from firstlight.kernels.reference.spans import check_spans, pages_of
from firstlight.kernels.reference.wide import wide

# Context rows whose keys, values and scores are held at once.
CONTEXT_ROWS = 2048


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
    out_TNC = q_TNW.new_empty(*q_TNW.shape[:2], value_width)
    for begin, end, rows_XW in _contexts(rows_TW, rows_PSW, starts_B1, contexts_B, table_BP):

        def shared(block: slice, rows_XW: Tensor = rows_XW) -> tuple[Tensor, Tensor]:
            part_1XW = rows_XW[block].unsqueeze(0)
            return part_1XW, part_1XW[..., :value_width]

        out_TNC[begin:end] = attend_blocks(q_TNW[begin:end], len(rows_XW), scale, shared)
    return out_TNC


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
    latent = expansion_NOC.shape[2]
    own = q_TNK.shape[2] - (rows_TW.shape[1] - latent)
    out_TNV = q_TNK.new_empty(*q_TNK.shape[:2], expansion_NOC.shape[1] - own)
    for begin, end, rows_XW in _contexts(rows_TW, rows_PSW, starts_B1, contexts_B, table_BP):

        def expanded(block: slice, rows_XW: Tensor = rows_XW) -> tuple[Tensor, Tensor]:
            part_XW = rows_XW[block]
            both_NXO = part_XW[:, :latent] @ expansion_NOC.transpose(1, 2)
            shared_NXS = part_XW[:, latent:].expand(len(expansion_NOC), -1, -1)
            return torch.cat((both_NXO[..., :own], shared_NXS), -1), both_NXO[..., own:]

        out_TNV[begin:end] = attend_blocks(q_TNK[begin:end], len(rows_XW), scale, expanded)
    return out_TNV


def _contexts(
    rows_TW: Tensor, rows_PSW: Tensor, starts_B1: Tensor, contexts_B: Tensor, table_BP: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Write all new rows; then yield each span and the rows of its sequence's whole context."""
    starts, contexts = starts_B1.tolist(), contexts_B.tolist()
    slots = rows_PSW.shape[1]
    pages = [
        pages_of(table_BP, sequence, context, slots, rows_PSW.shape[0])
        for sequence, context in enumerate(contexts)
    ]
    check_spans(starts, contexts, rows_TW.shape[0])
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        context = contexts[sequence]
        positions = torch.arange(context - (end - begin), context, device=rows_TW.device)
        page_ids = pages[sequence][positions // slots]
        rows_PSW[page_ids, positions % slots] = rows_TW[begin:end].to(rows_PSW.dtype)
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        if end > begin:
            rows_XW = rows_PSW[pages[sequence]].flatten(0, 1)[: contexts[sequence]]
            yield begin, end, rows_XW.to(rows_TW.dtype)


def attend_blocks(
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
