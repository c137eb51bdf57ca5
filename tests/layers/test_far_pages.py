"""Pages that lie outside a layer's tensors: the bits are those of pages that do not.

The pages of these tests lie in plain tensors of their own, the far ones behind the near ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.layers.far_pages import SEGMENT_STEP, Pending
from firstlight.layers.layer_state import (
    PagedKeysValues,
    PagedLatents,
    PagedState,
    QuantisedKeysValues,
    QuantisedLatents,
    page_tensors,
)
from firstlight.layers.paged_attention import PagedCall, PagedKernels
from firstlight.layers.patterned_attention import attend_pattern
from firstlight.layers.sparse_attention import choose_blocks
from firstlight.sharding.attention_pattern import FULL, AttentionPattern

SLOTS, HEADS, LAYER = 64, 4, 3
SETS = {"plain": reference_kernels(), "chosen": builtin_kernels().resolve(machine_query())}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # what the tokens left out weigh
SPARSE = AttentionPattern(block=128, blocks=3, recent=100, sinks=64)


@dataclass
class Waiting:
    """A copy that is made when somebody waits for it, and not before."""

    pairs: list[tuple[Tensor, Tensor]]

    def wait(self) -> None:
        for target, source in self.pairs:
            target.copy_(source)
        self.pairs = []


@dataclass
class Host:
    """Far pages of one layer in tensors of their own."""

    first: int
    tensors: tuple[Tensor, ...]
    sets: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    fetched: list[int] = field(default_factory=list)

    def staging(self, layer: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert layer == LAYER
        return self.sets

    def fetch(self, layer: int, pages: Sequence[int], into: Sequence[Tensor]) -> Pending:
        assert layer == LAYER and min(pages) >= self.first
        self.fetched += pages
        index = torch.tensor(pages) - self.first
        for target in into:
            target.view(torch.uint8).fill_(255)  # what is read too early is no number
        return Waiting([(x, y[index]) for x, y in zip(into, self.tensors, strict=True)])


def make_state(kind: str, num_pages: int) -> PagedState:
    rows, codes = torch.randn(num_pages, 2, SLOTS, 32), (num_pages, 2, SLOTS, 32)
    if kind == "heads":
        return PagedKeysValues(rows, rows.flip(0), 0, layer=LAYER,
                               summaries=torch.zeros(num_pages, 2, 2, 32).half())  # fmt: skip
    if kind == "int8 heads":
        parts = (torch.randint(-127, 128, codes).to(torch.int8) for _ in range(2))
        keys, values = parts
        scales = (torch.rand(2, num_pages, 2, SLOTS) / 64).half()
        return QuantisedKeysValues(keys, scales[0], values, scales[1], 0, layer=LAYER,
                                   summaries=torch.zeros(num_pages, 2, 2, 32).half())  # fmt: skip
    summaries = torch.zeros(num_pages, 2, 80).half()
    if kind == "latents":
        return PagedLatents(torch.randn(num_pages, SLOTS, 80), 0, layer=LAYER, summaries=summaries)
    bytes_PSW = torch.randint(-127, 128, (num_pages, SLOTS, 80)).to(torch.int8)
    scales_PSG = (torch.rand(num_pages, SLOTS, 2) / 64).half()
    return QuantisedLatents(bytes_PSW, scales_PSG, 0, layer=LAYER, summaries=summaries)


def kernels_of(kind: str, name: str) -> PagedKernels:
    chosen, prefix = SETS[name], "int8_" if "int8" in kind else ""
    names = ("paged_attention", "segment_attention")
    if "latents" in kind:
        names = ("latent_attention", "segment_latent_attention")
    whole, segment = (chosen[prefix + each] for each in names)
    latent = "latents" in kind
    return PagedKernels(whole, segment, chosen.linear, 64 if latent else 32, latent)


def make_call(kind: str, lengths: list[int], contexts: list[int], table: Tensor) -> PagedCall:
    tokens, bounds = sum(lengths), [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    width = 80 if "latents" in kind else 32
    size = (tokens, 80) if "latents" in kind else (tokens, 2, 32)
    new = tuple(torch.randn(size) for _ in range(1 if "latents" in kind else 2))
    return PagedCall(
        torch.randn(tokens, HEADS, width) * 2, new, bounds, torch.tensor(bounds).int(),
        torch.tensor(contexts).int(), table, 0.2,
    )  # fmt: skip


def copied(state: PagedState, pages: slice, **changes: Any) -> PagedState:
    """The same pages in tensors of their own, of which only some are there; all summaries are."""
    tensors = {
        name: value[pages].clone()
        for name, value in vars(state).items()
        if isinstance(value, Tensor) and name != "summaries"
    }
    assert state.summaries is not None
    return replace(state, **tensors, summaries=state.summaries.clone(), **changes)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["heads", "int8 heads", "latents", "int8 latents"])
@pytest.mark.parametrize("pattern", [FULL, SPARSE], ids=str)
def test_far_pages_give_the_bits_of_near_ones(
    kind: str, name: str, pattern: AttentionPattern
) -> None:
    """One sequence is near, one far, and one of both kinds; a segment takes many fetches."""
    torch.manual_seed(5)
    lengths, contexts = [1, 70, 3], [500, 2 * SEGMENT_STEP + 700, SEGMENT_STEP + 10]
    counts = [-(-context // SLOTS) for context in contexts]
    total = sum(counts)
    state, kernels = make_state(kind, total), kernels_of(kind, name)
    for page, bounds in enumerate(state.summaries):
        bounds.copy_(torch.randn(bounds.shape, generator=torch.Generator().manual_seed(page)))
    first = total // 2
    # Pages that are written are near: the last three of each table.
    near, far = list(range(first)), list(range(first, total))
    table = torch.zeros(3, max(counts), dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        pages = [near.pop() for _ in range(3)]
        rest = [(far if far and i % 3 else near or far).pop() for i in range(count - 3)]
        row[:count] = torch.tensor([*rest, *pages])
    call = make_call(kind, lengths, contexts, table)

    all_near = copied(state, slice(None))
    want = attend_pattern(call, all_near, kernels, pattern)
    room = SEGMENT_STEP // SLOTS
    sets = tuple(tuple(torch.empty_like(x[:room]) for x in page_tensors(state)) for _ in "ab")
    host = Host(first, tuple(x[first:] for x in page_tensors(state)), sets)
    some_near = copied(state, slice(first), far=host)
    assert torch.equal(attend_pattern(call, some_near, kernels, pattern), want)
    assert len(host.fetched) > 3
    assert all(
        torch.equal(x, y[:first])
        for x, y in zip(page_tensors(some_near), page_tensors(all_near), strict=True)
    )
    if pattern is SPARSE:
        assert torch.equal(some_near.summaries, all_near.summaries)


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["heads", "int8 heads", "latents", "int8 latents"]),
    cuts=st.lists(st.integers(1, 399), max_size=4, unique=True),
    blocks=st.integers(0, 3),
    recent=st.integers(1, 200),
)
def test_a_choice_does_not_depend_on_chunks(
    kind: str, cuts: list[int], blocks: int, recent: int
) -> None:
    torch.manual_seed(1)
    context, kernels = 400, kernels_of(kind, "chosen")
    pattern = AttentionPattern(block=64, blocks=blocks, recent=recent, sinks=1)
    table = torch.randperm(7).int()[None]
    whole = make_call(kind, [context], [context], table)
    state = make_state(kind, 7)
    want = attend_pattern(whole, copied(state, slice(None)), kernels, pattern)
    chunked, parts = copied(state, slice(None)), []
    ends = [*sorted(cuts), context]
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        part = whole._replace(
            q_TNK=whole.q_TNK[begin:end],
            new=tuple(x[begin:end] for x in whole.new),
            bounds=[0, end - begin],
            starts_B1=torch.tensor([0, end - begin]).int(),
            contexts_B=torch.tensor([end]).int(),
        )
        parts.append(attend_pattern(part, chunked, kernels, pattern))
    if not SETS["chosen"].is_plain("segment_attention"):
        assert torch.equal(torch.cat(parts), want)
    torch.testing.assert_close(torch.cat(parts), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_a_block_is_found_by_one_key_that_its_others_hide(kind: str) -> None:
    """The keys of every page have mean zero; only one page has a key that meets the query."""
    torch.manual_seed(2)
    context, found, pattern = 800, 5, AttentionPattern(block=64, blocks=1, recent=64, sinks=1)
    table = torch.arange(13).int()[None]
    state, kernels = copied(make_state(kind, 13), slice(None)), kernels_of(kind, "chosen")
    call = make_call(kind, [context], [context], table)
    q_NK = torch.zeros_like(call.q_TNK[0])
    q_NK[..., 3] = 80.0
    keys = call.new[0].fill_(0.0)
    keys[found * 64 : found * 64 + 2, ..., 3] = torch.tensor([1.0, -1.0]).view(
        2, *[1] * (keys.dim() - 2)
    )
    call = call._replace(q_TNK=torch.cat((call.q_TNK[:-1], q_NK[None])))
    want = attend_pattern(call, state, kernels, FULL)[-1]
    torch.testing.assert_close(attend_pattern(call, state, kernels, pattern)[-1], want, **CLOSE)


def test_of_equal_blocks_the_earlier_are_chosen_and_none_that_is_no_number() -> None:
    scores = torch.tensor([[[9.0, 1.0, 2.0, 1.0, 1.0, torch.nan, 7.0, 7.0]], [[torch.nan] * 8]])
    pattern = AttentionPattern(block=10, blocks=3, recent=15, sinks=4)
    chosen = choose_blocks(scores, torch.tensor([75, 75]), pattern)
    found = [row[0, : int(count)].tolist() for row, count in zip(*chosen, strict=True)]
    # Block 0 holds the sinks; the latest 15 tokens touch blocks 6 and 7.
    assert found == [[0, 1, 2, 3, 6, 7], [0, 6, 7]]
