"""Caches of a byte a value: its error, and attention against that over what bytes stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firstlight.kernels.reference import running_softmax as module
from firstlight.kernels.reference.attention import paged_attention
from firstlight.kernels.reference.latent import expanded_latent_attention, latent_attention
from firstlight.kernels.reference.quantised import (
    dequantised,
    int8_expanded_latent_attention,
    int8_latent_attention,
    int8_paged_attention,
    quantised,
    spread,
)

INT8, FP8 = torch.int8, torch.float8_e4m3fn
SLOTS, KV_HEADS, HEADS, CHANNELS = 4, 2, 6, 8
# Sequences with these new tokens behind these contexts before them.
BEFORE, NEW = (37, 0, 5), (1, 9, 30)


@given(
    width=st.integers(1, 200),
    group=st.sampled_from([1, 8, 64]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_an_error_is_at_most_half_a_step(width: int, group: int, size: float, seed: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * size
    whole, scales = quantised(x, group)
    assert whole.dtype == torch.int8 and whole.shape == x.shape
    assert scales.dtype == torch.float16 and scales.shape == (3, -(-width // group))
    steps = scales.float().repeat_interleave(group, -1)[:, :width]
    # fp16 has steps of 2^-24 at its low end, so a scale is off by half of that and a value by 127.
    assert ((dequantised(whole, scales, group) - x).abs() <= steps * 0.5001 + 127 / 2**25).all()
    assert (steps <= x.abs().max() / 127 * 1.001 + 2**-25).all()


@given(
    width=st.integers(1, 200),
    size=st.sampled_from([1e-2, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_an_fp8_error_is_a_sixteenth_of_the_value(width: int, size: float, seed: int) -> None:
    """Half of the last of three bits, or half of the least step, 2^-9 of a scale."""
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * size
    codes, scales = quantised(x, 64, FP8)
    assert codes.dtype == FP8 and codes.shape == x.shape and scales.dtype == torch.float16
    steps = scales.float().repeat_interleave(64, -1)[:, :width]
    most = torch.maximum(x.abs() / 16, steps / 2**10) * 1.0001 + 448 / 2**25
    assert ((dequantised(codes, scales, 64) - x).abs() <= most).all()


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [torch.inf, 1.0], [1e30, 1.0]])
    values = dequantised(*quantised(x, 2, dtype), 2)
    assert values[0].tolist() == [0.0, 0.0]
    assert not values[1:].sum(-1).isfinite().any()


@pytest.mark.parametrize("width", [1, 6, 8, 64, 96])
def test_spreading_keeps_products_and_evens_out_a_channel(width: int) -> None:
    x, y = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((spread(x) * spread(y)).sum(-1), (x * y).sum(-1))
    run = width & -width
    one = torch.zeros(width)
    one[0] = 1.0
    torch.testing.assert_close(spread(one)[:run].abs(), torch.full((run,), run**-0.5))
    assert not spread(one)[run:].any()


def test_one_large_channel_does_not_coarsen_the_others() -> None:
    torch.manual_seed(0)
    k = torch.randn(200, 64)
    k[:, 3] *= 30
    q = torch.randn(200, 64)
    q[:, 3] /= 30
    exact = q @ k.T
    plain = q @ dequantised(*quantised(k, 64), 64).T
    turned = spread(q) @ dequantised(*quantised(spread(k), 64), 64).T
    assert (turned - exact).norm() < (plain - exact).norm() / 2


def spans() -> tuple[Tensor, Tensor, Tensor, int]:
    contexts = [before + new for before, new in zip(BEFORE, NEW, strict=True)]
    width = max(-(-context // SLOTS) for context in contexts)
    table = torch.randperm(3 * width, generator=torch.Generator().manual_seed(1)).view(3, width)
    starts = torch.tensor([0, *torch.tensor(NEW).cumsum(0)]).int()
    return starts, torch.tensor(contexts).int(), table.int(), 3 * width


@pytest.fixture(params=[8, 2048])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the context and of queries that are smaller, and larger, than what is there."""
    monkeypatch.setattr(module, "CONTEXT_ROWS", request.param)
    monkeypatch.setattr(module, "QUERY_ROWS", request.param)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("window", "dtype"), [(None, INT8), (1, INT8), (7, INT8), (64, INT8), (None, FP8), (7, FP8)]
)
def test_attention_is_that_over_the_values_the_bytes_stand_for(
    window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    starts, contexts, table, pages = spans()
    q, k, v = (torch.randn(sum(NEW), n, CHANNELS) for n in (HEADS, KV_HEADS, KV_HEADS))
    held = torch.randn(2, pages, KV_HEADS, SLOTS, CHANNELS)
    caches = [quantised(x, CHANNELS, dtype) for x in held]
    floats = [dequantised(*cache, CHANNELS) for cache in caches]
    new = [dequantised(*quantised(x, CHANNELS, dtype), CHANNELS) for x in (spread(k), v)]
    want = paged_attention(spread(q), *new, *floats, starts, contexts, table, 0.4, window)
    tensors = [part for whole, scales in caches for part in (whole, scales[..., 0].clone())]
    got = int8_paged_attention(q, k, v, *tensors, starts, contexts, table, 0.4, window)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for written, wanted in zip((tensors[:2], tensors[2:]), floats, strict=True):
        values = dequantised(written[0], written[1].unsqueeze(-1), CHANNELS)
        torch.testing.assert_close(values, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_the_error_of_attention_is_within_what_half_steps_can_do(seed: int) -> None:
    """Scores move by at most d, so weights by a factor of e^2d; values by half a step besides."""
    torch.manual_seed(seed)
    context, scale = 300, CHANNELS**-0.5
    q, k, v = (torch.randn(context, n, CHANNELS) for n in (HEADS, KV_HEADS, KV_HEADS))
    pages = context // SLOTS
    floats = [torch.empty(pages, KV_HEADS, SLOTS, CHANNELS) for _ in "kv"]
    place = (torch.tensor([0, context]).int(), torch.tensor([context]).int())
    table = torch.arange(pages).int()[None]
    exact = paged_attention(q, k, v, *floats, *place, table, scale)
    whole = [torch.empty(pages, KV_HEADS, SLOTS, CHANNELS, dtype=torch.int8) for _ in "kv"]
    scales = [torch.empty(pages, KV_HEADS, SLOTS).half() for _ in "kv"]
    caches = (whole[0], scales[0], whole[1], scales[1])
    rough = int8_paged_attention(q, k, v, *caches, *place, table, scale)
    moved = scale * spread(q).abs().sum(-1).max() * scales[0].float().max() / 2
    most = (torch.exp(2 * moved) - 1) * v.abs().max() + scales[1].float().max() / 2
    assert 0 < (rough - exact).abs().max() <= most
    assert ((rough - exact).norm() / exact.norm()) < 0.01


def test_bytes_behind_the_window_are_never_read() -> None:
    torch.manual_seed(0)
    starts, contexts, table, pages = spans()
    q, k, v = (torch.randn(sum(NEW), n, CHANNELS) for n in (HEADS, KV_HEADS, KV_HEADS))
    whole, scales = quantised(torch.randn(pages, KV_HEADS, SLOTS, CHANNELS), CHANNELS)
    scales = scales[..., 0]
    spoiled = scales.clone()
    for page in table[0, : (37 - 8) // SLOTS]:
        spoiled[page] = torch.nan
    outs = [
        int8_paged_attention(
            q, k, v, whole.clone(), s.clone(), whole.clone(), s.clone(), starts, contexts, table,
            0.4, 8,
        )
        for s in (scales, spoiled)
    ]  # fmt: skip
    assert torch.equal(*outs)


@pytest.mark.parametrize(("width", "dtype"), [(70, INT8), (128, INT8), (70, FP8)])
def test_latents_are_read_as_the_values_the_bytes_stand_for(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    latent = width - 6
    starts, contexts, table, pages = spans()
    rows = torch.randn(sum(NEW), width)
    cache = quantised(torch.randn(pages, SLOTS, width), 64, dtype)
    new, floats = dequantised(*quantised(rows, 64, dtype), 64), dequantised(*cache, 64)
    q, expansion = torch.randn(sum(NEW), HEADS, width), torch.randn(HEADS, 12, latent)
    places = (starts, contexts, table, 0.2)
    want = latent_attention(q, new, floats.clone(), *places, latent)
    got = int8_latent_attention(q, rows, *(c.clone() for c in cache), *places, latent)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    keys = q[..., : 5 + 6].contiguous()
    want = expanded_latent_attention(keys, new, expansion, floats.clone(), *places)
    got = int8_expanded_latent_attention(keys, rows, expansion, *cache, *places)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dequantised(*cache, 64)[table[0, 37 // SLOTS], 37 % SLOTS], new[0])


def test_spans_that_contradict_are_refused_before_anything_is_written() -> None:
    starts, contexts, table, pages = spans()
    cache = [torch.zeros(pages, SLOTS, 64, dtype=torch.int8), torch.zeros(pages, SLOTS, 1).half()]
    rows = torch.ones(sum(NEW), 64)
    with pytest.raises(IndexError):
        int8_latent_attention(rows[:, None], rows, *cache, starts, contexts, table + 99, 1.0, 32)
    assert not cache[0].any() and not cache[1].any()
