"""Owns attention to chosen blocks: the bounds of the keys of every page, the choice, and reading
what was chosen.

Knows no projection and no cache policy. Each token chooses for itself, from its own query and the
pages before it alone: then chunks, batches, cache hits and preemption change nothing.

Shape letters: T tokens, N query heads, K key/value heads, G query heads of one of them, K query
width, B = 2 K bounds, P pages, S tokens of a page, J blocks, M blocks a token reads.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.kernels.carry import carried, new_carry
from firstlight.kernels.reference.quantised import dequantised, spread
from firstlight.layers.far_pages import FarPages
from firstlight.layers.layer_state import (
    PagedKeysValues,
    PagedState,
    QuantisedKeysValues,
    QuantisedLatents,
    page_tensors,
)
from firstlight.layers.paged_attention import (
    PagedCall,
    PagedKernels,
    Segment,
    stage,
    write_new,
)
from firstlight.sharding.attention_pattern import AttentionPattern
from firstlight.sharding.state_spec import INT8_GROUP

# Scores of summaries held at once.
SCORES_AT_ONCE = 1 << 22
TOKENS_AT_ONCE = 64
# Of what a key within the bounds of a page may score above their middle, how much is expected. All
# of it is the bound of Quest (arXiv:2406.10774), which a page of scattered keys never reaches.
HOPE = 0.5


class ChosenBlocks(NamedTuple):
    """Blocks [T, K, M] in ascending order, of which the first `counts_TK` count; the last of these
    is the token's own block.
    """

    blocks_TKM: Tensor
    counts_TK: Tensor


def attend_sparse(
    call: PagedCall,
    state: PagedState,
    kernels: PagedKernels,
    pattern: AttentionPattern,
) -> Tensor:
    """Writes new rows, summarises the pages they fill, and attends what each token chooses.

    Returns [T, N, V]. Where a choice covers the whole context this is full attention.
    """
    write_new(call, state, kernels)
    summarise(call, state)
    out_TNV = call.q_TNK.new_empty(*call.q_TNK.shape[:2], kernels.value_width)
    for sequence, (begin, end) in enumerate(pairwise(call.bounds)):
        if begin == end:
            continue
        reader = _Reader(call, state, kernels, pattern, sequence)
        for first in range(begin, end, reader.tokens_at_once):
            last = min(end, first + reader.tokens_at_once)
            out_TNV[first:last] = reader.read(first, last)
    return out_TNV


def summarise(call: PagedCall, state: PagedState) -> None:
    """Keeps the highest and the lowest value of each channel of the keys of every page that this
    step's tokens fill.
    """
    near = page_tensors(state)
    slots, table = near[0].shape[-2], call.table_BP
    filled = []
    for sequence, context in enumerate(call.contexts_B.tolist()):
        length = call.bounds[sequence + 1] - call.bounds[sequence]
        filled.append(table[sequence, (context - length) // slots : context // slots])
    pages_P = torch.cat(filled).long()
    if len(pages_P):
        summaries = _summaries(state)
        keys = _keys(state, tuple(x[pages_P] for x in near))
        summaries[pages_P] = torch.stack((keys.amax(-2), keys.amin(-2)), -2).to(summaries.dtype)


def choose_blocks(
    scores_TKJ: Tensor, positions_T: Tensor, pattern: AttentionPattern
) -> ChosenBlocks:
    """Returns the blocks of each token: the first and the latest ones, and of the blocks between
    them those of the highest scores; of equal ones the earlier. What is no number is not chosen.
    """
    own_T11 = (positions_T // pattern.block)[:, None, None]
    latest_T11 = ((positions_T - pattern.recent + 1).clamp(min=0) // pattern.block)[:, None, None]
    device, num_first = scores_TKJ.device, -(-pattern.sinks // pattern.block)
    shape = (*scores_TKJ.shape[:2], -1)
    none = int(positions_T.max()) // pattern.block + 1
    firsts = torch.arange(num_first, device=device).expand(shape)
    parts = [firsts.masked_fill(firsts >= latest_T11, none)]
    most = pattern.recent // pattern.block + 2
    latest = latest_T11 + torch.arange(most, device=device).expand(shape)
    parts.append(latest.masked_fill(latest > own_T11, none))
    count = min(pattern.blocks, scores_TKJ.shape[2])
    if count:
        index_J = torch.arange(scores_TKJ.shape[2], device=device)
        may_TKJ = (index_J >= num_first) & (index_J < latest_T11)
        scores_TKJ = scores_TKJ.masked_fill(~may_TKJ | scores_TKJ.isnan(), -torch.inf)
        best_TKM, chosen_TKM = _best(scores_TKJ, count)
        parts.append(chosen_TKM.masked_fill(best_TKM == -torch.inf, none))
    blocks_TKM = torch.cat(parts, -1).sort(-1).values
    return ChosenBlocks(blocks_TKM, (blocks_TKM < none).sum(-1))


def _best(scores_TKJ: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores and where they are; of equal ones at the end the earlier are taken."""
    found = scores_TKJ.topk(count, -1)
    least_TK1 = found.values[..., -1:]
    equal_TKJ = scores_TKJ == least_TK1
    if not bool((equal_TKJ.sum(-1) > (found.values == least_TK1).sum(-1)).any()):
        return found.values, found.indices
    room_TK1 = count - (scores_TKJ > least_TK1).sum(-1, keepdim=True)
    taken_TKJ = (scores_TKJ > least_TK1) | (equal_TKJ & (equal_TKJ.cumsum(-1) <= room_TK1))
    index_TKM = taken_TKJ.nonzero()[:, 2].view(*scores_TKJ.shape[:2], count)
    return scores_TKJ.gather(-1, index_TKM), index_TKM


class _Reader:
    """Reads what tokens of one sequence choose."""

    def __init__(
        self,
        call: PagedCall,
        state: PagedState,
        kernels: PagedKernels,
        pattern: AttentionPattern,
        sequence: int,
    ) -> None:
        self._call, self._state, self._kernels = call, state, kernels
        self._pattern = pattern
        self._near = page_tensors(state)
        self._slots = self._near[0].shape[-2]
        self._context = int(call.contexts_B[sequence])
        self._end = call.bounds[sequence + 1]
        self._table_P = call.table_BP[sequence, : -(-self._context // self._slots)]
        summaries = _summaries(state)
        self._heads = summaries.shape[1] if summaries.dim() == 4 else 1
        # The summaries of all pages before the latest tokens, in the order of the context.
        pages_P = self._table_P[: self._context // self._slots].long()
        bounds = summaries[pages_P].to(torch.promote_types(call.q_TNK.dtype, torch.float32))
        bounds_PKB = bounds.view(len(pages_P), self._heads, 2 * bounds.shape[-1])
        self._bounds_KPB = bounds_PKB.transpose(0, 1).contiguous()
        per_token = max(1, call.q_TNK.shape[1] * len(pages_P))
        self.tokens_at_once = min(TOKENS_AT_ONCE, max(1, SCORES_AT_ONCE // per_token))

    def read(self, first: int, last: int) -> Tensor:
        """Attends for tokens [first, last) of the step; returns [T, N, V]."""
        q_TNK = self._call.q_TNK[first:last]
        begin = self._context - self._end + first
        positions_T = torch.arange(begin, begin + last - first, device=q_TNK.device)
        chosen = choose_blocks(self._scores(q_TNK, positions_T), positions_T, self._pattern)
        pages_TKP = self._pages(chosen)
        block = self._pattern.block
        contexts_TK = (chosen.counts_TK - 1) * block + positions_T[:, None] % block + 1
        used = torch.arange(pages_TKP.shape[2], device=q_TNK.device) * self._slots
        pages_TKP = pages_TKP.masked_fill(used >= contexts_TK.unsqueeze(2), 0)
        far = self._state.far
        if far is None or not bool((pages_TKP >= far.first).any()):
            return self._attend(q_TNK, self._near, pages_TKP, contexts_TK)
        return self._attend_staged(q_TNK, pages_TKP, contexts_TK, far)

    def _scores(self, q_TNK: Tensor, positions_T: Tensor) -> Tensor:
        """How well each block may fit each token: its best page for the best of the heads that
        share a choice, [T, K, J].
        """
        per_block = self._pattern.block // self._slots
        latest = max(0, int(positions_T[-1]) - self._pattern.recent + 1) // self._pattern.block
        if self._state_spreads():
            q_TNK = spread(q_TNK)
        heads, tokens = self._heads, len(q_TNK)
        if latest == 0:
            return q_TNK.new_empty(tokens, heads, 0)
        q_TNB = _meeting_bounds(q_TNK.to(self._bounds_KPB.dtype))
        by_head_TKGB = q_TNB.reshape(tokens, heads, -1, q_TNB.shape[2])
        q_KMB = by_head_TKGB.transpose(0, 1).flatten(1, 2)
        bounds_KPB = self._bounds_KPB[:, : latest * per_block]
        scores = [
            self._kernels.linear(q_MB.contiguous(), bounds_PB.contiguous())
            for q_MB, bounds_PB in zip(q_KMB, bounds_KPB, strict=True)
        ]
        whole = torch.stack(scores).view(heads, tokens, -1, latest, per_block)
        return whole.amax((2, 4)).transpose(0, 1)

    def _state_spreads(self) -> bool:
        return isinstance(self._state, QuantisedKeysValues)

    def _pages(self, chosen: ChosenBlocks) -> Tensor:
        """The pages [T, K, P] of chosen blocks."""
        per_block = self._pattern.block // self._slots
        within = torch.arange(per_block, device=chosen.blocks_TKM.device)
        index = (chosen.blocks_TKM.unsqueeze(-1) * per_block + within).flatten(2)
        return self._table_P[index.clamp(max=len(self._table_P) - 1)].long()

    def _attend(
        self, q_TNK: Tensor, pages: Sequence[Tensor], pages_TKP: Tensor, contexts_TK: Tensor
    ) -> Tensor:
        """Every token and key/value head is a sequence of one query over pages of its own."""
        tokens, heads = contexts_TK.shape
        q_SGK = q_TNK.reshape(tokens * heads, -1, q_TNK.shape[2])
        contexts_S = contexts_TK.flatten().int()
        head_K1 = torch.arange(heads, device=q_TNK.device).unsqueeze(1)
        carry_SGE = new_carry(q_SGK, self._kernels.value_width)
        self._kernels.segment(
            q_SGK,
            *(None for _ in self._call.new),
            *(_each_head(x, heads) for x in pages),
            torch.arange(len(q_SGK) + 1, dtype=torch.int32, device=q_TNK.device),
            contexts_S,
            torch.zeros_like(contexts_S),
            contexts_S,
            (pages_TKP * heads + head_K1).flatten(0, 1).int(),
            self._call.scale,
            carry_SGE,
        )
        return carried(carry_SGE, q_TNK.dtype).view(*q_TNK.shape[:2], -1)

    def _attend_staged(
        self, q_TNK: Tensor, pages_TKP: Tensor, contexts_TK: Tensor, far: FarPages
    ) -> Tensor:
        """Brings all chosen pages into a staging set, for as many tokens as it has room for."""
        into = far.staging(self._state.layer)[0]
        unique_P, places_TKP = torch.unique(pages_TKP, return_inverse=True)
        if len(unique_P) > len(into[0]) and len(q_TNK) > 1:
            half = len(q_TNK) // 2
            parts = [slice(0, half), slice(half, None)]
            return torch.cat(
                [self._attend_staged(q_TNK[i], pages_TKP[i], contexts_TK[i], far) for i in parts]
            )
        assert len(unique_P) <= len(into[0]), "a staging set holds less than one token chooses"
        staged = stage(Segment(0, 0, unique_P.tolist()), self._near, into, far, self._state.layer)
        staged.wait()
        return self._attend(q_TNK, into, staged.table_1P[0].long()[places_TKP], contexts_TK)


def _meeting_bounds(q_TNK: Tensor) -> Tensor:
    """Returns queries [T, N, 2 K] whose product with the highest and the lowest values of a page is
    that with the middle of its bounds, plus a share of how far a key within them may score higher.
    """
    part_TNK = q_TNK.abs() * HOPE
    return torch.cat((q_TNK + part_TNK, q_TNK - part_TNK), -1) * 0.5


def _each_head(pages: Tensor, heads: int) -> Tensor:
    """Returns [P * K, 1, S, ...], each head's part as a page; latents as they are."""
    return pages if heads == 1 else pages.view(-1, 1, *pages.shape[2:])


def _summaries(state: PagedState) -> Tensor:
    assert state.summaries is not None, "the state of a layer that chooses blocks has no summaries"
    return state.summaries


def _keys(state: PagedState, pages: Sequence[Tensor]) -> Tensor:
    """The keys [..., S, H] of pages in float32 or wider, as queries meet them."""
    if isinstance(state, QuantisedKeysValues):
        return pages[0].float() * pages[1].float().unsqueeze(-1)
    if isinstance(state, QuantisedLatents):
        return dequantised(pages[0], pages[1], INT8_GROUP)
    wide = pages[0] if pages[0].dtype == torch.float64 else pages[0].float()
    assert not isinstance(state, PagedKeysValues) or wide.dim() == 4
    return wide
