"""Tests of compiled paged attention against the reference and fp64, and of its invariance."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native

NATIVE = builtin_kernels().resolve(machine_query())
CHOSEN = next(line for line in NATIVE.describe() if line.startswith("paged_attention"))
REFERENCE = reference_kernels()

pytestmark = pytest.mark.skipif(
    "native" not in CHOSEN, reason=f"native kernels: {load_native().reason or CHOSEN}"
)


@dataclass
class Step:
    """One call: tokens of this step and contexts after it, with a filled cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    starts: Tensor
    contexts: Tensor
    table: Tensor

    def run(self, function, scale: float, window: int | None = None) -> tuple[Tensor, ...]:
        """Return the output and the cache afterwards; this step's own cache stays as it is."""
        keys, values = self.keys.clone(), self.values.clone()
        rows = (self.starts, self.contexts, self.table)
        out = function(self.q, self.k, self.v, keys, values, *rows, scale, window)
        return out, keys, values

    def double(self) -> "Step":
        """Return the same step in fp64."""
        floats = (self.q, self.k, self.v, self.keys, self.values)
        return Step(*(x.double() for x in floats), self.starts, self.contexts, self.table)


def _step(sequences: list[tuple[int, int]], heads: tuple[int, int, int], slots: int = 16) -> Step:
    """Build a step of (tokens, context) pairs; unused slots and pages hold NaN."""
    generator = torch.Generator().manual_seed(len(sequences) * 1000 + heads[2] + slots)
    num_heads, kv_heads, channels = heads
    total = sum(tokens for tokens, _ in sequences)
    q = torch.randn(total, num_heads, channels, generator=generator) * 2
    k, v = torch.randn(2, total, kv_heads, channels, generator=generator)
    width = max(-(-context // slots) for _, context in sequences) + 1
    pages = width * len(sequences) + 2
    table = torch.randperm(pages - 1, generator=generator)[: width * len(sequences)]
    table = table.int().view(len(sequences), width)
    keys, values = torch.full((2, pages, kv_heads, slots, channels), torch.nan)
    for row, (tokens, context) in zip(table, sequences, strict=True):
        old = torch.arange(context - tokens)
        for cache in (keys, values):
            fresh = torch.randn(len(old), kv_heads, channels, generator=generator)
            cache[row[old // slots].long(), :, old % slots] = fresh
    starts = torch.tensor([0, *(tokens for tokens, _ in sequences)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in sequences]).int()
    return Step(q, k, v, keys, values, starts, contexts, table)


CASES = [
    ([(1, 1)], (2, 1, 64), None),
    ([(1, 100)], (9, 3, 64), None),
    ([(1, 2500), (1, 17), (1, 1024), (1, 1025)], (9, 3, 64), None),
    ([(70, 70)], (9, 3, 64), None),
    ([(130, 1100), (1, 40), (0, 5), (3, 3)], (6, 2, 80), None),
    ([(20, 90)], (4, 4, 128), None),
    ([(33, 33), (1, 2100)], (8, 1, 24), None),
    ([(5, 50)], (3, 1, 1), None),
    ([(40, 200), (1, 300)], (4, 2, 64), 33),
    ([(200, 200), (1, 3000)], (4, 2, 64), 128),
    ([(2, 1500)], (40, 2, 64), None),
    ([(9, 9)], (4, 2, 64), 1),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slots", [16, 5])
def test_attention_and_cache(case: tuple, slots: int) -> None:
    sequences, heads, window = case
    step = _step(sequences, heads, slots)
    scale = heads[2] ** -0.5
    out, keys, values = step.run(NATIVE.paged_attention, scale, window)
    exact, exact_keys, exact_values = step.double().run(REFERENCE.paged_attention, scale, window)
    assert torch.equal(keys.nan_to_num(7), exact_keys.float().nan_to_num(7))
    assert torch.equal(values.nan_to_num(7), exact_values.float().nan_to_num(7))
    # Values are at most about 4; scores of about 10 carry an error of 1e-6.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=6e-6)


def test_token_does_not_depend_on_batch_or_chunking() -> None:
    step = _step([(300, 1400)], (9, 3, 64))
    whole, *_ = step.run(NATIVE.paged_attention, 0.125)
    keys, values = step.keys.clone(), step.values.clone()
    parts = []
    for begin, end in ((0, 1), (1, 130), (130, 299), (299, 300)):
        rows = slice(begin, end)
        starts = torch.tensor([0, end - begin]).int()
        contexts = torch.tensor([1100 + end]).int()
        parts.append(
            NATIVE.paged_attention(
                step.q[rows], step.k[rows], step.v[rows], keys, values,
                starts, contexts, step.table, 0.125, None,
            )
        )  # fmt: skip
    assert torch.equal(torch.cat(parts), whole)


def test_rotary_in_one_call_equals_two() -> None:
    step = _step([(60, 90), (1, 33)], (9, 3, 64))
    positions = torch.cat((torch.arange(30, 90), torch.tensor([32])))
    angles = torch.arange(128.0).unsqueeze(1) * torch.rand(32)
    tables = (angles.cos(), angles.sin())
    rows = (step.starts, step.contexts, step.table)
    results = []
    for kernels in (NATIVE, REFERENCE):
        keys, values = step.keys.clone(), step.values.clone()
        out = kernels.rotary_paged_attention(
            step.q, step.k, step.v, positions, *tables, keys, values, *rows, 0.125, None
        )
        results.append((out, keys.nan_to_num(7), values.nan_to_num(7)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_one_sequence_without_numbers_spares_the_others() -> None:
    step = _step([(20, 40), (20, 40)], (4, 2, 64))
    clean, *_ = step.run(NATIVE.paged_attention, 0.125)
    step.q[3, 1, 5] = torch.nan
    step.v[10, 0, 7] = torch.inf
    out, *_ = step.run(NATIVE.paged_attention, 0.125)
    assert out[3, 1].isnan().all() and not out[10, 0, 7].isfinite()
    assert torch.equal(out[20:], clean[20:])


@pytest.mark.parametrize("damage", ["page", "negative", "table", "context", "starts"])
def test_wrong_indices_are_errors_and_write_nothing(damage: str) -> None:
    step = _step([(4, 40), (1, 20)], (4, 2, 64))
    if damage in ("page", "negative"):
        step.table[1, 1] = len(step.keys) if damage == "page" else -1
    elif damage == "table":
        step.contexts[0] = 16 * step.table.shape[1] + 1
    elif damage == "context":
        step.contexts[0] = 3
    else:
        step.starts[1] = 6
    before = step.keys.clone()
    rows = (step.starts, step.contexts, step.table)
    for kernels in (NATIVE, REFERENCE):
        with pytest.raises((IndexError, ValueError)):
            kernels.paged_attention(
                step.q, step.k, step.v, step.keys, step.values, *rows, 0.125, None
            )
        assert torch.equal(step.keys.nan_to_num(7), before.nan_to_num(7))


def test_no_tokens() -> None:
    step = _step([(0, 5)], (4, 2, 64))
    out, *_ = step.run(NATIVE.paged_attention, 0.125)
    assert out.shape == (0, 4, 64)
