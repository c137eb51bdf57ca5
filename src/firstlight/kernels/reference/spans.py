"""Owns the spans and page tables of a packed batch: their checks, and groups of equal lengths.

Knows no operation. Shape letters: B sequences, P pages, S sequences of one length, L their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


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
    """Tokens [begin, end) of the step, the last of a context that lies in `page_ids`."""

    begin: int
    end: int
    context: int
    page_ids: Tensor
    slots: int

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The page and the slot of each new token."""
        first = self.context - (self.end - self.begin)
        positions = torch.arange(first, self.context, device=self.page_ids.device)
        return self.page_ids[positions // self.slots], positions % self.slots

    def pages_at(self, block: slice) -> tuple[Tensor, slice]:
        """The pages of context positions, and where these are among their slots."""
        first = block.start // self.slots
        page_ids = self.page_ids[first : -(-block.stop // self.slots)]
        shift = first * self.slots
        return page_ids, slice(block.start - shift, block.stop - shift)


def paged_spans(
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
    *,
    cache: tuple[int, int],
    tokens: int,
) -> list[PagedSpan]:
    """Return the spans that hold tokens; `cache` is the number of pages, and the slots of one.

    Raises IndexError for a page outside the cache, ValueError for starts and contexts that
    contradict each other or the number of tokens.
    """
    starts, contexts = starts_B1.tolist(), contexts_B.tolist()
    num_pages, slots = cache
    pages = [
        _pages_of(table_BP, sequence, context, slots, num_pages)
        for sequence, context in enumerate(contexts)
    ]
    check_spans(starts, contexts, tokens)
    return [
        PagedSpan(begin, end, contexts[sequence], pages[sequence], slots)
        for sequence, (begin, end) in enumerate(pairwise(starts))
        if end > begin
    ]


def _pages_of(table_BP: Tensor, sequence: int, context: int, slots: int, num_pages: int) -> Tensor:
    """Return the page ids (int64) of a sequence's context, checked against the cache's size."""
    needed = -(-context // slots)
    if needed > table_BP.shape[1]:
        raise IndexError(
            f"sequence {sequence} has {context} tokens, its table only {table_BP.shape[1]} pages"
        )
    page_ids = table_BP[sequence, :needed].long()
    if needed and not 0 <= int(page_ids.min()) <= int(page_ids.max()) < num_pages:
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
