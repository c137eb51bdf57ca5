"""Owns softmax over a context a block at a time: what queries have seen so far, and one block more.

Knows no page and no operation. The sums are those of Milakov and Gimelshein (arXiv:1805.02867);
taken block by block in order, they are the same bits wherever somebody stops and goes on.

Shape letters: T tokens, N query heads, K key/value heads, M queries of one key/value head (tokens
times heads of a group), H key channels, V value channels, X positions of a block, E = V + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.kernels.carry import carried, new_carry
from firstlight.kernels.reference.wide import wide

# Context positions, and tokens of a step, whose scores are held at once.
CONTEXT_ROWS = 2048
QUERY_ROWS = 256


class Sums(NamedTuple):
    """Of each query the greatest score [K, M, 1], the sum of exponentials [K, M, 1] less that
    score, and the values [K, M, V] they weigh.
    """

    greatest_KM1: Tensor
    total_KM1: Tensor
    mixed_KMV: Tensor


class Sight(NamedTuple):
    """What a query at position p sees: positions up to its own, of these with a `window` only
    (p - window, p] and those below `sinks`.
    """

    window: int | None = None
    sinks: int = 0


BlockOf = Callable[[slice], tuple[Tensor, Tensor]]


def attend_span(
    q_TNH: Tensor,
    newest: int,
    block_of: BlockOf,
    *,
    carry_TNE: Tensor,
    kv_heads: int,
    keys: tuple[int, int],
    sight: Sight,
) -> None:
    """Adds context positions [keys[0], keys[1]) to what T queries have seen, in place.

    Queries are multiplied by the scale already, the last one is at position `newest`. `block_of`
    gives keys [K or 1, X, H] and values [K or 1, X, V] of a block of the context.
    """
    for begin, end in _query_parts(len(q_TNH)):
        part_TNE = carry_TNE[begin:end]
        sums = _attend_part(
            q_TNH[begin:end],
            newest + 1 - len(q_TNH) + begin,
            block_of,
            _sums_in(part_TNE, kv_heads),
            keys=keys,
            sight=sight,
        )
        part_TNE.copy_(_by_token(torch.cat(sums, -1), end - begin))


def attend_all(q_TNH: Tensor, block_of: BlockOf, widths: tuple[int, int], sight: Sight) -> Tensor:
    """Returns what the T tokens of a whole sequence attend to, [T, N, V]; differentiable.

    `widths` are K and V; the rest, and the bits, are those of `attend_span`.
    """
    kv_heads, width = widths
    parts = []
    for begin, end in _query_parts(len(q_TNH)):
        part_TNH = q_TNH[begin:end]
        fresh = _sums_in(new_carry(part_TNH, width), kv_heads)
        sums = _attend_part(part_TNH, begin, block_of, fresh, keys=(0, end), sight=sight)
        parts.append(carried(_by_token(torch.cat(sums, -1), end - begin), q_TNH.dtype))
    return torch.cat(parts)


def _sums_in(carry_TNE: Tensor, kv_heads: int) -> Sums:
    state_KME = _by_head(carry_TNE, kv_heads)
    return Sums(state_KME[..., :1], state_KME[..., 1:2], state_KME[..., 2:])


def _query_parts(tokens: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, tokens, QUERY_ROWS):
        yield begin, min(tokens, begin + QUERY_ROWS)


def _attend_part(
    q_TNH: Tensor,
    least: int,
    block_of: BlockOf,
    sums: Sums,
    *,
    keys: tuple[int, int],
    sight: Sight,
) -> Sums:
    """Adds context positions [keys[0], keys[1]) to sums of T queries, the first at `least`."""
    kv_heads = len(sums.greatest_KM1)
    last = least + len(q_TNH)
    q_KMH = _by_head(wide(q_TNH), kv_heads)
    positions_T = torch.arange(least, last, device=q_TNH.device)
    rows_M1 = positions_T.repeat_interleave(q_TNH.shape[1] // kv_heads).unsqueeze(1)
    for block in context_blocks(keys[0], min(keys[1], last), least, sight):
        all_seen = sight.window is None and block.stop <= least + 1
        hidden_MX = None if all_seen else _hidden(rows_M1, block, sight)
        sums = add_block(sums, q_KMH, block_of(block), hidden_MX)
    return sums


def add_block(
    sums: Sums, q_KMH: Tensor, block: tuple[Tensor, Tensor], hidden_MX: Tensor | None
) -> Sums:
    """Returns the sums with the positions of a block added, of which `hidden_MX` are not seen.

    The greatest score of a query stays -inf until a block holds a position it sees.
    """
    keys_KXH, values_KXV = (wide(part).to(q_KMH.dtype) for part in block)
    scores_KMX = q_KMH @ keys_KXH.transpose(1, 2)
    if hidden_MX is not None:
        scores_KMX = scores_KMX.masked_fill(hidden_MX, -torch.inf)
    # Any base gives the same result, so gradients need not know where this one came from.
    highest_KM1 = scores_KMX.detach().amax(-1, keepdim=True)
    higher_KM1 = torch.maximum(sums.greatest_KM1, highest_KM1)
    base_KM1 = higher_KM1.masked_fill(higher_KM1 == -torch.inf, 0)
    faded_KM1 = (sums.greatest_KM1 - base_KM1).exp()
    shares_KMX = (scores_KMX - base_KM1).exp()
    total_KM1 = sums.total_KM1 * faded_KM1 + shares_KMX.sum(-1, keepdim=True)
    return Sums(higher_KM1, total_KM1, sums.mixed_KMV * faded_KM1 + shares_KMX @ values_KXV)


def _by_head(x_TNH: Tensor, kv_heads: int) -> Tensor:
    """[T, N, H] -> [K, M, H], a token's heads of one group side by side."""
    tokens, _, channels = x_TNH.shape
    return x_TNH.reshape(tokens, kv_heads, -1, channels).transpose(0, 1).flatten(1, 2)


def _by_token(x_KMV: Tensor, tokens: int) -> Tensor:
    """[K, M, V] -> [T, N, V]."""
    by_token_TKV = x_KMV.view(len(x_KMV), tokens, -1, x_KMV.shape[2]).transpose(0, 1)
    return by_token_TKV.flatten(1, 2)


def context_blocks(first: int, last: int, least: int, sight: Sight) -> Iterator[slice]:
    """Yields the blocks of [first, last), cut at multiples of CONTEXT_ROWS, that a query at
    `least` or later sees. What lies between the sinks and the window is in none of them.
    """
    seen = 0 if sight.window is None else max(0, least - sight.window + 1)
    runs = [(first, last)] if seen <= sight.sinks else [(0, sight.sinks), (seen, last)]
    for run_first, run_last in runs:
        start, stop = max(first, run_first), min(last, run_last)
        for begin in range(start // CONTEXT_ROWS * CONTEXT_ROWS, stop, CONTEXT_ROWS):
            yield slice(max(start, begin), min(stop, begin + CONTEXT_ROWS))


def _hidden(rows_M1: Tensor, block: slice, sight: Sight) -> Tensor:
    columns_1X = torch.arange(block.start, block.stop, device=rows_M1.device).unsqueeze(0)
    hidden_MX = columns_1X > rows_M1
    if sight.window is not None:
        behind_MX = columns_1X <= rows_M1 - sight.window
        hidden_MX |= behind_MX & (columns_1X >= sight.sinks)
    return hidden_MX
