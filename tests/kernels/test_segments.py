"""Segments of a context give the bits of the whole, for every kind of pages and every kernel.

Shape letters: T tokens of the step, N query heads, K key/value heads, H channels, P pages, S slots.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.carry import carried, new_carry

KERNELS = {"plain": reference_kernels(), "chosen": builtin_kernels().resolve(machine_query())}
SLOTS, HEADS, STEP = 16, 4, 2048


class Case(NamedTuple):
    """The two operations of one kind of pages, new rows, and tensors of pages filled at random."""

    whole: str
    segment: str
    q: Tensor
    new: tuple[Tensor, ...]
    pages: tuple[Tensor, ...]
    tail: tuple[Any, ...]


def make_case(kind: str, tokens: int, num_pages: int) -> Case:
    torch.manual_seed(tokens)
    rows = torch.randn(num_pages, 2, SLOTS, 32)
    codes = torch.randint(-127, 128, (2, num_pages, 2, SLOTS, 32)).to(torch.int8)
    scales = (torch.rand(2, num_pages, 2, SLOTS) / 64).half()
    if kind == "heads":
        new = tuple(torch.randn(2, tokens, 2, 32))
        return Case("paged_attention", "segment_attention", torch.randn(tokens, HEADS, 32) * 2,
                    new, (rows, rows.flip(0)), ())  # fmt: skip
    if kind == "int8 heads":
        new = tuple(torch.randn(2, tokens, 2, 32))
        return Case("int8_paged_attention", "int8_segment_attention",
                    torch.randn(tokens, HEADS, 32) * 2, new,
                    (codes[0], scales[0], codes[1], scales[1]), ())  # fmt: skip
    q, latents = torch.randn(tokens, HEADS, 80) * 2, torch.randn(num_pages, SLOTS, 80)
    new = (torch.randn(tokens, 80),)
    if kind == "latents":
        return Case("latent_attention", "segment_latent_attention", q, new, (latents,), (64,))
    latent_scales = (torch.rand(num_pages, SLOTS, 2) / 64).half()
    whole = torch.randint(-127, 128, latents.shape).to(torch.int8)
    return Case("int8_latent_attention", "int8_segment_latent_attention", q, new,
                (whole, latent_scales), (64,))  # fmt: skip


KINDS = ("heads", "int8 heads", "latents", "int8 latents")


def copies(case: Case) -> tuple[Tensor, ...]:
    return tuple(x.clone() for x in case.pages)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_segments_have_the_bits_of_the_whole(kind: str, name: str, tokens: int) -> None:
    context = 2 * STEP + 300
    num_pages = -(-context // SLOTS) + 1
    case = make_case(kind, tokens, num_pages)
    table = torch.randperm(num_pages, dtype=torch.int32)[None, : num_pages - 1]
    starts, contexts = torch.tensor([0, tokens]).int(), torch.tensor([context]).int()
    kernels, caches = KERNELS[name], copies(case)
    want = kernels[case.whole](case.q, *case.new, *caches, starts, contexts, table, 0.2, *case.tail)

    parts, none = copies(case), (None,) * len(case.new)
    carry = new_carry(case.q, want.shape[2])
    spans = (starts, contexts)
    nothing = torch.zeros(1).int()
    kernels[case.segment](case.q, *case.new, *parts, *spans, nothing, nothing, table, 0.2, carry)
    for first in range(0, context, STEP):
        last = min(context, first + STEP)
        pages = table[:, first // SLOTS : -(-last // SLOTS)].contiguous()
        ends = torch.tensor([first]).int(), torch.tensor([last]).int()
        kernels[case.segment](case.q, *none, *parts, *spans, *ends, pages, 0.2, carry)
    assert torch.equal(carried(carry, case.q.dtype), want)
    assert all(map(torch.equal, parts, caches))


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_kernels_compute_what_plain_ones_do(kind: str) -> None:
    lengths, contexts = (1, 5, 90), (1100, 5, 190)
    case = make_case(kind, sum(lengths), 3 * 69)
    starts = torch.tensor([0, 1, 6, 96]).int()
    table = torch.randperm(3 * 69).int().view(3, 69)
    results = []
    for kernels in KERNELS.values():
        caches = copies(case)
        out = kernels[case.whole](
            case.q, *case.new, *caches, starts, torch.tensor(contexts).int(), table, 0.2,
            *case.tail,
        )  # fmt: skip
        results.append((out, caches))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=2e-5)
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "sinks"), [(1, 3), (40, 20), (100, 4), (5000, 8)])
def test_sinks_are_seen_beside_the_window(kind: str, name: str, window: int, sinks: int) -> None:
    """As a full context of what is seen; pages between are another's and hold no number."""
    tokens, context = 3, 1500
    case = make_case(kind, tokens, 95)
    table = torch.randperm(95, dtype=torch.int32)[None, :94]
    caches, kernels = copies(case), KERNELS[name]
    hidden = range(-(-sinks // SLOTS), max(0, context - tokens - window + 1) // SLOTS)
    for page in (table[0, index] for index in hidden):
        for x in caches:
            x[page] = torch.nan if x.is_floating_point() else 0
    got = kernels[case.whole](
        case.q, *case.new, *caches, torch.tensor([0, tokens]).int(),
        torch.tensor([context]).int(), table, 0.2, *case.tail, window, sinks,
    )  # fmt: skip
    for token in range(tokens):
        position = context - tokens + token
        seen = sorted({*range(min(sinks, position + 1)),
                       *range(max(0, position - window + 1), position + 1)})  # fmt: skip
        slots = torch.tensor(seen)
        pages = table[0].long()[slots // SLOTS], slots % SLOTS
        packed = []
        for x in caches:
            by_slot = x.transpose(1, 2) if x.shape[1] == 2 else x
            rows = by_slot[pages]
            full = torch.zeros(-(-len(seen) // SLOTS) * SLOTS, *rows.shape[1:], dtype=x.dtype)
            full[: len(seen)] = rows
            paged = full.view(-1, SLOTS, *rows.shape[1:])
            packed.append((paged.transpose(1, 2) if x.shape[1] == 2 else paged).contiguous())
        one = slice(token, token + 1)
        want = KERNELS["plain"][case.whole](
            case.q[one], *(x[one] for x in case.new), *packed, torch.tensor([0, 1]).int(),
            torch.tensor([len(seen)]).int(), torch.arange(len(packed[0])).int()[None], 0.2,
            *case.tail,
        )  # fmt: skip
        torch.testing.assert_close(got[one], want, rtol=1e-4, atol=2e-5)


def test_plain_kernels_hold_no_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 262,144 positions are never together: a block of 2,048 is the most."""
    widest = []
    matmul = Tensor.__matmul__

    def watched(one: Tensor, other: Tensor) -> Tensor:
        out = matmul(one, other)
        widest.append(max(out.shape[-1], other.shape[-2]))
        return out

    monkeypatch.setattr(Tensor, "__matmul__", watched)
    context, pages = 262_144, torch.zeros(1, 1, 4096, 8)
    table = torch.zeros(1, context // 4096, dtype=torch.int32)
    out = KERNELS["plain"].paged_attention(
        torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 8), pages, pages.clone(),
        torch.tensor([0, 1]).int(), torch.tensor([context]).int(), table, 1.0,
    )  # fmt: skip
    assert out.isfinite().all()
    assert max(widest) == 2048
