"""Owns attention over pages for every kind of them: whole contexts, segments that lie far away, and
chosen blocks.

Knows no projection and no cache policy; a layer hands it queries, new rows and the kernels of its
kind of pages.

Shape letters: T tokens, N query heads, K query width, V value width, E = V + 2 what a query carries
from segment to segment, B sequences, P pages of a table.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.kernels.carry import carried, new_carry
from firstlight.layers.far_pages import SEGMENT_STEP, FarPages, Pending
from firstlight.layers.layer_state import PagedState, page_tensors


class PagedKernels(NamedTuple):
    """The operations over one kind of pages. `whole` writes and attends a context, `segment` a part
    of one; values have `value_width` channels. `latent` operations take that width too. `linear`
    multiplies queries and summaries.
    """

    whole: Callable[..., Tensor]
    segment: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    value_width: int
    latent: bool


class PagedCall(NamedTuple):
    """Queries [T, N, K] of B sequences, their new rows (keys and values, or latents) [T, ...], and
    where the pages of their contexts are. `bounds` are the starts on the host.
    """

    q_TNK: Tensor
    new: tuple[Tensor, ...]
    bounds: Sequence[int]
    starts_B1: Tensor
    contexts_B: Tensor
    table_BP: Tensor
    scale: float

    def part(self, sequences: Sequence[int]) -> tuple[Tensor, "PagedCall"]:
        """Returns the tokens of some of the sequences, and the call of these alone."""
        device = self.q_TNK.device
        tokens = [t for s in sequences for t in range(self.bounds[s], self.bounds[s + 1])]
        bounds = [0]
        for s in sequences:
            bounds.append(bounds[-1] + self.bounds[s + 1] - self.bounds[s])
        index_S = torch.tensor(tokens, device=device)
        chosen_B = torch.tensor(sequences, device=device)
        return index_S, PagedCall(
            self.q_TNK[index_S],
            tuple(x[index_S] for x in self.new),
            bounds,
            torch.tensor(bounds, dtype=self.starts_B1.dtype, device=device),
            self.contexts_B[chosen_B],
            self.table_BP[chosen_B],
            self.scale,
        )


class Sight(NamedTuple):
    """What a token sees: all up to itself, or with a `window` so many, and the first `sinks`."""

    window: int | None = None
    sinks: int = 0


def attend_whole(call: PagedCall, state: PagedState, kernels: PagedKernels, sight: Sight) -> Tensor:
    """Writes the new rows and attends each context, in one call; returns [T, N, V]."""
    width = (kernels.value_width,) if kernels.latent else ()
    return kernels.whole(
        call.q_TNK,
        *call.new,
        *page_tensors(state),
        call.starts_B1,
        call.contexts_B,
        call.table_BP,
        call.scale,
        *width,
        sight.window,
        sight.sinks,
    )


def attend_anywhere(call: PagedCall, state: PagedState, kernels: PagedKernels) -> Tensor:
    """Attends whole contexts wherever their pages lie, with the same bits; returns [T, N, V]."""
    far = state.far
    is_far = [False] * len(call.contexts_B)
    if far is not None:
        is_far = (call.table_BP >= far.first).any(1).tolist()  # host sync
    if far is None or not any(is_far):
        return attend_whole(call, state, kernels, Sight())
    out_TNV = call.q_TNK.new_empty(*call.q_TNK.shape[:2], kernels.value_width)
    near = [sequence for sequence, value in enumerate(is_far) if not value]
    if near:
        index_S, part = call.part(near)
        out_TNV[index_S] = attend_whole(part, state, kernels, Sight())
    for sequence, (begin, end) in enumerate(pairwise(call.bounds)):
        if is_far[sequence] and begin < end:
            _, part = call.part([sequence])
            out_TNV[begin:end] = _attend_far(part, state, kernels, far)
    return out_TNV


def write_new(call: PagedCall, state: PagedState, kernels: PagedKernels) -> None:
    """Writes the new rows into their pages, which are near ones, and attends nothing."""
    near_BP = call.table_BP
    if state.far is not None:
        near_BP = near_BP.masked_fill(near_BP >= state.far.first, 0)
    none_B = torch.zeros_like(call.contexts_B)
    kernels.segment(
        call.q_TNK,
        *call.new,
        *page_tensors(state),
        call.starts_B1,
        call.contexts_B,
        none_B,
        none_B,
        near_BP,
        call.scale,
        new_carry(call.q_TNK, kernels.value_width),
    )


class Segment(NamedTuple):
    """Positions [first, last) and their pages, near and far ones."""

    first: int
    last: int
    pages: list[int]


class Staged(NamedTuple):
    """A segment whose pages lie in `tensors`, in the order `table_1P`, once `pending` is over."""

    segment: Segment
    tensors: tuple[Tensor, ...]
    table_1P: Tensor
    pending: Pending | None

    def wait(self) -> None:
        """Returns when the pages are there."""
        if self.pending is not None:
            self.pending.wait()


def _attend_far(call: PagedCall, state: PagedState, kernels: PagedKernels, far: FarPages) -> Tensor:
    """Attends one sequence segment by segment; while one is computed the next one is fetched."""
    write_new(call, state, kernels)
    carry_TNE = new_carry(call.q_TNK, kernels.value_width)
    staged = _staged(call, state, far)
    ahead = next(staged, None)
    while ahead is not None:
        now, ahead = ahead, None
        now.wait()
        ahead = next(staged, None)
        first, last = (
            torch.full_like(call.contexts_B, at) for at in (now.segment.first, now.segment.last)
        )
        kernels.segment(
            call.q_TNK,
            *(None for _ in call.new),
            *now.tensors,
            call.starts_B1,
            call.contexts_B,
            first,
            last,
            now.table_1P,
            call.scale,
            carry_TNE,
        )
    return carried(carry_TNE, call.q_TNK.dtype)


def _staged(call: PagedCall, state: PagedState, far: FarPages) -> Iterator[Staged]:
    """Yields the segments of a sequence in order, each while its far pages are on their way.

    A segment is asked for before the one ahead of it is computed, so two sets of buffers do.
    """
    near, buffers = page_tensors(state), far.staging(state.layer)
    slots, device = near[0].shape[-2], near[0].device
    length = len(buffers[0][0]) * slots // SEGMENT_STEP * SEGMENT_STEP
    assert length > 0, "a staging set holds less than a segment"
    context, turn = int(call.contexts_B[0]), 0
    for first in range(0, context, length):
        last = min(context, first + length)
        pages = call.table_BP[0, first // slots : -(-last // slots)].tolist()
        segment = Segment(first, last, pages)
        if all(page < far.first for page in pages):
            table = torch.tensor([pages], dtype=torch.int32, device=device)
            yield Staged(segment, near, table, None)
            continue
        into = buffers[turn % 2]
        turn += 1
        yield stage(segment, near, into, far, state.layer)


def stage(
    segment: Segment,
    near: Sequence[Tensor],
    into: tuple[Tensor, ...],
    far: FarPages,
    layer: int,
) -> Staged:
    """Starts to bring all pages of a segment into one set of buffers: far ones first, then near."""
    is_far = [page >= far.first for page in segment.pages]
    wanted = [page for page, value in zip(segment.pages, is_far, strict=True) if value]
    kept = [page for page, value in zip(segment.pages, is_far, strict=True) if not value]
    pending = far.fetch(layer, wanted, tuple(x[: len(wanted)] for x in into)) if wanted else None
    if kept:
        index = torch.tensor(kept, device=near[0].device)
        for target, source in zip(into, near, strict=True):
            target[len(wanted) : len(segment.pages)] = source[index]
    places, counts = [], [0, len(wanted)]
    for value in is_far:
        places.append(counts[0] if value else counts[1])
        counts[0 if value else 1] += 1
    table = torch.tensor([places], dtype=torch.int32, device=near[0].device)
    return Staged(segment, into, table, pending)
