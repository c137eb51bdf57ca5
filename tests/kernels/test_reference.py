"""Tests of the plain PyTorch operations against formulas written out another way."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.kernels.builtin import reference_kernels

KERNELS = reference_kernels()


def test_rms_norm_rounds_before_the_weight() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    unit = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(KERNELS.rms_norm(x, weight, 1e-5), weight * unit.bfloat16())


def test_add_rms_norm_returns_norm_and_sum() -> None:
    x, residual, weight = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, KERNELS.rms_norm(total, weight, 1e-6))


def test_rotary_turns_pairs_and_passes_the_rest() -> None:
    q, k, positions = torch.randn(5, 2, 6), torch.randn(5, 1, 6), torch.tensor([3, 0, 9, 1, 1])
    angles = torch.arange(10.0).unsqueeze(1) * torch.tensor([1.0, 0.1])
    q_out, k_out = KERNELS.rotary(q, k, positions, angles.cos(), angles.sin())
    as_complex = torch.complex(q[..., :2], q[..., 2:4])
    turned = as_complex * torch.exp(1j * angles[positions]).unsqueeze(1)
    torch.testing.assert_close(q_out, torch.cat((turned.real, turned.imag, q[..., 4:]), -1))
    assert torch.equal(k_out[1], k[1])


def test_greedy_takes_the_first_of_equals_and_its_log_probability() -> None:
    ids, log_probability = KERNELS.greedy(torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.0]]))
    assert ids.tolist() == [1, 0]
    expected = [2 - math.log(2 * math.exp(2) + 1), 1 - math.log(math.e + 2)]
    torch.testing.assert_close(log_probability, torch.tensor(expected))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 50)),
    cut=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_paged_attention_in_chunks_equals_one_pass(
    lengths: list[int], window: int | None, cut: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q = torch.randn(total, 4, 8, generator=generator)
    k, v = torch.randn(2, total, 2, 8, generator=generator)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    whole = KERNELS.attention(q, k, v, starts, 0.3, window)
    pages = torch.randperm(40, generator=generator).int().view(4, 10)
    keys, values = torch.full((2, 40, 2, 4, 8), torch.nan)
    out = torch.empty_like(q)
    for begin in range(0, max(lengths), cut):
        spans = [(min(begin, n), min(begin + cut, n)) for n in lengths]
        rows = torch.cat(
            [
                torch.arange(int(start) + a, int(start) + b)
                for start, (a, b) in zip(starts[:-1], spans, strict=True)
            ]
        )
        out[rows] = KERNELS.paged_attention(
            q[rows],
            k[rows],
            v[rows],
            keys,
            values,
            torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int(),
            torch.tensor([b for _, b in spans]).int(),
            pages,
            0.3,
            window,
        )
    torch.testing.assert_close(out, whole)


def test_attention_is_plain_softmax() -> None:
    q, k, v = torch.randn(6, 3, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    scores = torch.einsum("qnh,ch->nqc", q, k[:, 0]) * 0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    expected = torch.einsum("nqc,ch->qnh", scores.softmax(-1), v[:, 0])
    out = KERNELS.attention(q, k, v, torch.tensor([0, 6]).int(), 0.5, None)
    torch.testing.assert_close(out, expected)


def test_attention_has_gradients() -> None:
    q, k, v = (torch.randn(5, 2, 4, requires_grad=True) for _ in range(3))
    KERNELS.attention(q, k, v, torch.tensor([0, 2, 5]).int(), 0.5, None).sum().backward()
    assert v.grad is not None and v.grad.abs().sum() > 0


def _step(table: list[list[int]], contexts: list[int]) -> torch.Tensor:
    x = torch.randn(1, 1, 4)
    keys, values = torch.zeros(2, 3, 1, 4, 4)
    tables = torch.tensor(table).int()
    starts = torch.tensor([0, 1]).int()
    context = torch.tensor(contexts).int()
    out: torch.Tensor = KERNELS.paged_attention(
        x, x, x, keys, values, starts, context, tables, 1.0, None
    )
    return out


@pytest.mark.parametrize("table", [[[0, 3]], [[-1, 1]], [[1]]])
def test_pages_outside_the_cache_are_an_error(table: list[list[int]]) -> None:
    with pytest.raises(IndexError, match="sequence 0"):
        _step(table, [5])


def test_page_beyond_the_context_is_not_looked_at() -> None:
    assert _step([[2, -1]], [4]).isfinite().all()


def test_context_shorter_than_its_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="sequence 0"):
        _step([[0]], [0])
