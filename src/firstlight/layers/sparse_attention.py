"""Owns attention to chosen blocks: the bounds of the keys of every page, the choice, and reading
what was chosen.

Knows no projection and no cache policy. Each token chooses for itself, from its own query and the
pages before it alone: then chunks, batches, cache hits and preemption change nothing.

Shape letters: T tokens, N query heads, K key/value heads, G query heads of one of them, K query
width, B = 2 K bounds, P pages, S tokens of a page, J blocks, M blocks a token reads.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    attending = _Attending(call.scale, state, kernels)
    ready: list[_Tile] = []
    for tile in _tiles(call, state, kernels, pattern):
        if ready and tile.last - ready[0].first > TOKENS_AT_ONCE:
            attending.read(ready, out_TNV)
            ready = []
        ready.append(tile)
    if ready:
        attending.read(ready, out_TNV)
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
        scores_TKJ = _allowed(scores_TKJ, latest_T11, num_first)
        best_TKM, chosen_TKM = _best(scores_TKJ, count)
        parts.append(chosen_TKM.masked_fill(best_TKM == -torch.inf, none))
    blocks_TKM = torch.cat(parts, -1).sort(-1).values
    return ChosenBlocks(blocks_TKM, (blocks_TKM < none).sum(-1))


def _allowed(scores_TKJ: Tensor, latest_T11: Tensor, num_first: int) -> Tensor:
    """Scores of which those that are read anyway, lie ahead or are no number are -inf."""
    scores_TKJ = scores_TKJ.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    scores_TKJ[..., :num_first] = -torch.inf
    begin = int(latest_T11.min())
    index_J = torch.arange(begin, max(begin, scores_TKJ.shape[2]), device=scores_TKJ.device)
    scores_TKJ[..., begin:].masked_fill_(index_J >= latest_T11, -torch.inf)
    return scores_TKJ


def _best(scores_TKJ: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores and where they are; of equal ones at the end the earlier are taken."""
    found = scores_TKJ.topk(count, -1)
    least_TK1 = found.values.amin(-1, keepdim=True)
    if not bool(((scores_TKJ >= least_TK1).sum(-1) > count).any()):
        return found.values, found.indices
    equal_TKJ = scores_TKJ == least_TK1
    room_TK1 = count - (scores_TKJ > least_TK1).sum(-1, keepdim=True)
    taken_TKJ = (scores_TKJ > least_TK1) | (equal_TKJ & (equal_TKJ.cumsum(-1) <= room_TK1))
    index_TKM = taken_TKJ.nonzero()[:, 2].view(*scores_TKJ.shape[:2], count)
    return scores_TKJ.gather(-1, index_TKM), index_TKM


BY_TOKEN = ("q_TNK", "pages_TKP", "contexts_TK")


class _Tile(NamedTuple):
    """Tokens [first, last) of a step, the pages [T, K, P] each reads and how many positions of
    these; pages behind them are 0.
    """

    first: int
    last: int
    q_TNK: Tensor
    pages_TKP: Tensor
    contexts_TK: Tensor


def _tiles(
    call: PagedCall, state: PagedState, kernels: PagedKernels, pattern: AttentionPattern
) -> Iterator[_Tile]:
    """Yields what all tokens of a step read, a few tokens of one sequence at once."""
    for sequence, (begin, end) in enumerate(pairwise(call.bounds)):
        if begin == end:
            continue
        chooser = _Chooser(call, state, kernels, pattern, sequence)
        for first in range(begin, end, chooser.tokens_at_once):
            yield chooser.choose(first, min(end, first + chooser.tokens_at_once))


class _Chooser:
    """Chooses what tokens of one sequence read."""

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
        self._slots = page_tensors(state)[0].shape[-2]
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

    def choose(self, first: int, last: int) -> _Tile:
        """Chooses for tokens [first, last) of the step."""
        q_TNK = self._call.q_TNK[first:last]
        begin = self._context - self._end + first
        positions_T = torch.arange(begin, begin + last - first, device=q_TNK.device)
        chosen = choose_blocks(self._scores(q_TNK, positions_T), positions_T, self._pattern)
        pages_TKP = self._pages(chosen)
        block = self._pattern.block
        contexts_TK = (chosen.counts_TK - 1) * block + positions_T[:, None] % block + 1
        used = torch.arange(pages_TKP.shape[2], device=q_TNK.device) * self._slots
        pages_TKP = pages_TKP.masked_fill(used >= contexts_TK.unsqueeze(2), 0)
        return _Tile(first, last, q_TNK, pages_TKP, contexts_TK)

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


class StagedPlaces:
    """Which pages lie where in a staging set of `room` pages; of `num_ids` pages in all."""

    def __init__(self, num_ids: int, room: int, device: torch.device) -> None:
        self.places_A = torch.full((num_ids,), -1, device=device)
        self.room, self._used = room, 0

    def empty(self, room: int) -> None:
        """Forgets what lies where in a set, which has `room` pages from now on."""
        self.places_A.fill_(-1)
        self.room, self._used = room, 0

    def place(self, pages_P: Tensor) -> tuple[Tensor, int]:
        """Returns which of the pages are still to be brought, and from which place on. When there
        is no room behind those that lie there, all are to be brought.
        """
        missing_P = pages_P[self.places_A[pages_P] < 0]
        if self._used + len(missing_P) > self.room:
            self.empty(self.room)
            missing_P = pages_P
        return missing_P, self._used

    def put(self, pages_P: Tensor, places_P: Tensor) -> None:
        """Notes that pages lie at these places, behind all others."""
        self.places_A[pages_P] = places_P.to(self.places_A.dtype)
        self._used += len(pages_P)


class _Attending:
    """Reads what tokens chose, those of several sequences at once."""

    def __init__(self, scale: float, state: PagedState, kernels: PagedKernels) -> None:
        self._scale, self._state, self._kernels = scale, state, kernels
        self._near = page_tensors(state)
        if state.far is not None:
            summaries, room = _summaries(state), len(state.far.staging(state.layer)[0][0])
            self._staged = StagedPlaces(len(summaries), room, summaries.device)

    def read(self, tiles: Sequence[_Tile], out_TNV: Tensor) -> None:
        """Attends for tiles and writes what their tokens attend to into [T, N, V] of the step."""
        first, last = tiles[0].first, tiles[-1].last
        widest = max(tile.pages_TKP.shape[2] for tile in tiles)
        pages = [pad(tile.pages_TKP, (0, widest - tile.pages_TKP.shape[2])) for tile in tiles]
        chosen = _Tile(
            first,
            last,
            torch.cat([tile.q_TNK for tile in tiles]),
            torch.cat(pages),
            torch.cat([tile.contexts_TK for tile in tiles]),
        )
        far = self._state.far
        if far is None or not bool((chosen.pages_TKP >= far.first).any()):
            out_TNV[first:last] = self._attend(chosen, self._near)
        else:
            out_TNV[first:last] = self._attend_staged(chosen, far)

    def _attend(self, tile: _Tile, pages: Sequence[Tensor]) -> Tensor:
        """Every token and key/value head is a sequence of one query over pages of its own."""
        tokens, heads = tile.contexts_TK.shape
        q_SGK = tile.q_TNK.reshape(tokens * heads, -1, tile.q_TNK.shape[2])
        contexts_S = tile.contexts_TK.flatten().int()
        head_K1 = torch.arange(heads, device=q_SGK.device).unsqueeze(1)
        carry_SGE = new_carry(q_SGK, self._kernels.value_width)
        self._kernels.segment(
            q_SGK,
            *(None for _ in range(1 if self._kernels.latent else 2)),
            *(_each_head(x, heads) for x in pages),
            torch.arange(len(q_SGK) + 1, dtype=torch.int32, device=q_SGK.device),
            contexts_S,
            torch.zeros_like(contexts_S),
            contexts_S,
            (tile.pages_TKP * heads + head_K1).flatten(0, 1).int(),
            self._scale,
            carry_SGE,
        )
        return carried(carry_SGE, tile.q_TNK.dtype).view(*tile.q_TNK.shape[:2], -1)

    def _attend_staged(self, tile: _Tile, far: FarPages) -> Tensor:
        """Brings all chosen pages into a staging set, for as many tokens as it has room for."""
        unique_P = torch.unique(tile.pages_TKP)
        into, room = far.staging(self._state.layer)[0], self._staged.room
        tokens = len(tile.q_TNK)
        if len(unique_P) > room and tokens > 1:
            halves = slice(0, tokens // 2), slice(tokens // 2, None)
            parts = [tile._replace(**{f: getattr(tile, f)[i] for f in BY_TOKEN}) for i in halves]
            return torch.cat([self._attend_staged(part, far) for part in parts])
        if len(unique_P) > room:  # one token chooses more than all are to share
            into = tuple(x.new_empty(len(unique_P), *x.shape[1:]) for x in into)
            self._staged.empty(len(unique_P))
        missing_P, first = self._staged.place(unique_P)
        if len(missing_P):
            wanted = Segment(0, 0, missing_P.tolist())
            staged = stage(
                wanted, self._near, tuple(x[first:] for x in into), far, self._state.layer
            )
            staged.wait()
            self._staged.put(missing_P, staged.table_1P[0] + first)
        places_TKP = self._staged.places_A[tile.pages_TKP]
        if len(unique_P) > room:
            self._staged.empty(room)
        return self._attend(tile._replace(pages_TKP=places_TKP), into)


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
