"""Tests of compiled attention over latent pages against the reference and fp64.

Shape letters: T tokens of the step, N heads, W row width, P pages, S slots, B sequences.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native

NATIVE = builtin_kernels().resolve(machine_query())
REFERENCE = reference_kernels()
CHOSEN = next(line for line in NATIVE.describe() if line.startswith("latent_attention"))
PAGES = 2  # index of the pages among the arguments

pytestmark = pytest.mark.skipif(
    "native" not in CHOSEN, reason=f"native kernels: {load_native().reason or CHOSEN}"
)

# (tokens, context) of each sequence; heads, row width, value width
SHAPES = [
    ([(1, 1)], 2, 64, 32),
    ([(0, 3)], 2, 64, 32),
    ([(1, 100), (3, 50)], 5, 40, 24),
    ([(1, 1500)], 96, 576, 512),
    ([(2, 1100), (1, 40), (0, 3), (70, 1090)], 96, 96, 64),
    ([(20, 20), (1, 2100)], 3, 33, 33),
    ([(1, 5)], 1, 1, 1),
]


def _call(spans: list[tuple[int, int]], heads: int, width: int, values: int) -> list[Any]:
    """Return arguments for a filled cache; slots and pages not in use hold NaN."""
    torch.manual_seed(width + heads)
    slots, tokens = 16, sum(count for count, _ in spans)
    needed = max(-(-context // slots) for _, context in spans)
    pages = torch.full((needed * len(spans) + 1, slots, width), torch.nan)
    table = torch.randperm(len(pages))[: needed * len(spans)].int().view(len(spans), needed)
    for row, (count, context) in zip(table, spans, strict=True):
        old = torch.arange(context - count)
        pages[row[old // slots].long(), old % slots] = torch.randn(len(old), width)
    starts = torch.tensor([0, *(count for count, _ in spans)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in spans]).int()
    q, rows = torch.randn(tokens, heads, width) * 2, torch.randn(tokens, width)
    return [q, rows, pages, starts, contexts, table, width**-0.5, values]


def _run(function, call: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the output and the pages afterwards; the call's own stay as they are."""
    pages = call[PAGES].clone()
    return function(*call[:PAGES], pages, *call[PAGES + 1 :]), pages


def _doubled(call: list[Any]) -> list[Any]:
    return [*(x.double() for x in call[:3]), *call[3:]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_close_to_the_reference_and_same_pages(shape) -> None:
    call = _call(*shape)
    exact, _ = _run(REFERENCE.latent_attention, _doubled(call))
    plain, pages = _run(REFERENCE.latent_attention, call)
    actual, own_pages = _run(NATIVE.latent_attention, call)
    assert torch.equal(own_pages.nan_to_num(), pages.nan_to_num())
    assert actual.shape == exact.shape
    if exact.numel():
        bound = 2 * float((plain - exact).abs().max()) + 4e-7 * float(exact.abs().max())
        assert float((actual - exact).abs().max()) <= bound


def test_a_token_does_not_depend_on_the_batch() -> None:
    call = _call([(2, 2100), (1, 40)], 96, 64, 48)
    together, _ = _run(NATIVE.latent_attention, call)
    q, rows, pages, _, contexts, table, *rest = call
    starts = torch.tensor([0, 2]).int()
    alone, _ = _run(
        NATIVE.latent_attention,
        [q[:2], rows[:2], pages, starts, contexts[:1], table[:1], *rest],
    )
    assert torch.equal(together[:2], alone)


def test_what_it_does_not_take_goes_to_the_reference() -> None:
    call = _call([(3, 30)], 4, 64, 32)
    plain, _ = _run(REFERENCE.latent_attention, call)
    apart = call[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(_run(NATIVE.latent_attention, [apart, *call[1:]])[0], plain)
    half = [*(x.bfloat16() for x in call[:3]), *call[3:]]
    assert _run(NATIVE.latent_attention, half)[0].dtype == torch.bfloat16


def test_a_page_outside_the_cache_is_an_error() -> None:
    call = _call([(3, 30)], 4, 64, 32)
    call[5] = call[5] + 99
    with pytest.raises(IndexError):
        NATIVE.latent_attention(*call)
