"""Owns the spans and page tables of a packed batch: their checks, and groups of equal lengths.

Knows no operation. Shape letters: B sequences, P pages, S sequences of one length, L their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.kernels.host_copy import on_host


class EqualSpans(NamedTuple):
    """Sequences with `length` tokens each: their indices in the batch [S], and their tokens."""

    length: int
    sequences_S: Tensor
    index_SL: Tensor


def equal_spans(starts: Sequence[int], device: torch.device) -> list[EqualSpans]:
    """Returns the spans [starts[b], starts[b + 1]) grouped by length, empty ones left out."""
    by_length: dict[int, list[int]] = {}
    for sequence in range(len(starts) - 1):
        length = starts[sequence + 1] - starts[sequence]
        if length > 0:
            by_length.setdefault(length, []).append(sequence)
    groups = []
    for length, sequences in by_length.items():
        first_S1 = torch.tensor([[starts[s]] for s in sequences], device=device)
        index_SL = first_S1 + torch.arange(length, device=device)
        sequences_S = torch.tensor(sequences, device=device)
        groups.append(EqualSpans(length, sequences_S, index_SL))
    return groups


class PagedSpan(NamedTuple):
    """Tokens [begin, end) of the step, the last of a context. Positions from `keys[0]` on lie in
    `page_ids`; those up to `keys[1]` are attended.
    """

    begin: int
    end: int
    context: int
    page_ids: Tensor
    slots: int
    keys: tuple[int, int]

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The page and the slot of each new token."""
        first = self.context - (self.end - self.begin) - self.keys[0]
        positions = torch.arange(first, self.context - self.keys[0], device=self.page_ids.device)
        return self.page_ids[positions // self.slots], positions % self.slots

    def pages_at(self, block: slice) -> tuple[Tensor, slice]:
        """The pages of context positions, and where these are among their slots."""
        start, stop = block.start - self.keys[0], block.stop - self.keys[0]
        first = start // self.slots
        page_ids = self.page_ids[first : -(-stop // self.slots)]
        shift = first * self.slots
        return page_ids, slice(start - shift, stop - shift)


class Segment(NamedTuple):
    """Positions [first, last) of each context [B] that a call attends; its tables begin at
    `first`, a multiple of a page. Whether new tokens are `written`: then tables cover these too.
    """

    firsts_B: Tensor
    lasts_B: Tensor
    written: bool


def paged_spans(
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    *,
    cache: tuple[int, int],
    tokens: int,
    segment: Segment | None = None,
) -> list[PagedSpan]:
    """Return the spans that hold tokens; `cache` is the number of pages, and the slots of one.

    Raises IndexError for a page outside the cache, ValueError for starts and contexts that
    contradict each other, the number of tokens or the segment.
    """
    starts, contexts = on_host(starts_B1).tolist(), on_host(contexts_B).tolist()
    keys = [(0, context) for context in contexts]
    ends = contexts
    if segment is not None:
        keys = list(zip(segment.firsts_B.tolist(), segment.lasts_B.tolist(), strict=True))
        _check_segment(keys, contexts, cache[1])
        if not segment.written:
            ends = [last for _, last in keys]
    pages = [
        _pages_of(table_BP, sequence, end - keys[sequence][0], cache)
        for sequence, end in enumerate(ends)
    ]
    check_spans(starts, contexts, tokens)
    return [
        PagedSpan(begin, end, contexts[sequence], pages[sequence], cache[1], keys[sequence])
        for sequence, (begin, end) in enumerate(pairwise(starts))
        if end > begin
    ]


def _check_segment(keys: list[tuple[int, int]], contexts: list[int], slots: int) -> None:
    if len(keys) != len(contexts):
        raise ValueError(f"segments of {len(keys)} sequences for {len(contexts)}")
    for sequence, ((first, last), context) in enumerate(zip(keys, contexts, strict=True)):
        if not 0 <= first <= last <= context or first % slots:
            raise ValueError(
                f"sequence {sequence}: positions {first} to {last} are no segment of a context of "
                f"{context} in pages of {slots}"
            )


def _pages_of(table_BP: Tensor, sequence: int, tokens: int, cache: tuple[int, int]) -> Tensor:
    """Return the page ids (int64) of a sequence's tokens, checked against the cache's size."""
    num_pages, slots = cache
    needed = -(-max(0, tokens) // slots)
    if needed > table_BP.shape[1]:
        raise IndexError(
            f"sequence {sequence} has {tokens} tokens, its table only {table_BP.shape[1]} pages"
        )
    page_ids = table_BP[sequence, :needed].long()
    known = on_host(table_BP)[sequence, :needed]
    if needed and not 0 <= int(known.min()) <= int(known.max()) < num_pages:
        raise IndexError(f"sequence {sequence} names a page outside the {num_pages} of the cache")
    return page_ids


def check_spans(starts: list[int], contexts: list[int] | None, tokens: int) -> None:
    lengths = [end - begin for begin, end in pairwise(starts)]
    if starts[:1] != [0] or starts[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"starts {starts} do not cut {tokens} tokens into sequences")
    if contexts is None:
        return
    if len(contexts) != len(lengths):
        raise ValueError(f"{len(contexts)} contexts for {len(lengths)} sequences")
    for sequence, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        if context < length:
            raise ValueError(f"sequence {sequence}: {length} tokens in a context of {context}")
