"""The sampler: what it keeps, what it never chooses, and that a choice depends on nothing else."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.kernels.builtin import reference_kernels
from firstlight.runner.sampler import (
    SampleRow,
    allowed_tokens,
    sample,
    token_logprobs,
    uniform,
)
from firstlight.schedule.request import SamplingParams

KERNELS = reference_kernels()


def row(prompt=(1, 2), output=(), **params):
    settings = SamplingParams(**{"max_tokens": 8, **params})
    return SampleRow(settings, [*prompt, *output], len(prompt))


def logits(num_rows=1, vocabulary=50, seed=0):
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def allowed(values, **params):
    """Token ids that are ever drawn over many seeds."""
    rows = [row(temperature=1.0, seed=seed, **params) for seed in range(400)]
    return set(sample(values.expand(400, -1), rows, KERNELS))


def test_temperature_zero_takes_the_most_likely_token():
    values = logits(3)
    assert sample(values, [row(temperature=0.0)] * 3, KERNELS) == values.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-46, 1e-300])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_takes_the_most_likely_token_too(temperature, truncation):
    values = logits(3)
    rows = [row(temperature=temperature, seed=seed, **truncation) for seed in range(3)]
    assert sample(values, rows, KERNELS) == values.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-38, 1e-300])
def test_a_tiny_repetition_penalty_draws_a_token_seen_before(penalty, temperature):
    values = torch.tensor([[0.5, 1.0, 2.0, 3.0]])
    one = row(temperature=temperature, repetition_penalty=penalty)
    assert sample(values, [one], KERNELS)[0] in {1, 2}


def test_a_draw_does_not_depend_on_the_rest_of_the_batch():
    values = logits(4)
    rows = [row(temperature=1.0, seed=seed, top_p=0.9) for seed in range(4)]
    together = sample(values, rows, KERNELS)
    alone = [sample(values[i : i + 1], [rows[i]], KERNELS)[0] for i in range(4)]
    assert together == alone


def test_top_k_keeps_the_k_most_likely():
    values = logits()
    assert allowed(values, top_k=3) == set(values[0].topk(3).indices.tolist())


def test_top_p_keeps_the_smallest_set_of_enough_mass():
    values = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert allowed(values, top_p=0.6) == {0, 1}
    assert allowed(values, top_p=0.5) == {0}
    assert allowed(values, top_p=0.81) == {0, 1, 2}


def test_min_p_is_relative_to_the_most_likely():
    values = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert allowed(values, min_p=0.29) == {0, 1, 2}


def test_nucleus_wider_than_the_candidates_is_still_exact():
    values = torch.zeros(1, 5000)
    values[0, 0] = 1.0
    drawn = allowed(values, top_p=0.99)
    assert len(drawn) > 300


def test_draws_follow_the_distribution():
    values = torch.tensor([[0.5, 0.3, 0.2]]).log()
    rows = [row(temperature=1.0, seed=seed) for seed in range(4000)]
    drawn = sample(values.expand(4000, -1), rows, KERNELS)
    shares = [drawn.count(i) / 4000 for i in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_penalties_and_bias_change_the_choice():
    values = torch.tensor([[2.0, 1.9, 0.0]])
    assert sample(values, [row(output=(0,), temperature=0.0)], KERNELS) == [0]
    penalised = row(output=(0,), temperature=0.0, presence_penalty=0.5)
    assert sample(values, [penalised], KERNELS) == [1]
    repeated = row(prompt=(0,), temperature=0.0, repetition_penalty=1.5)
    assert sample(values, [repeated], KERNELS) == [1]
    biased = row(temperature=0.0, logit_bias={2: 10.0})
    assert sample(values, [biased], KERNELS) == [2]


def test_end_tokens_wait_for_min_tokens():
    values = torch.tensor([[2.0, 1.0]])
    early = row(temperature=0.0, min_tokens=1, end_token_ids=(0,))
    late = row(output=(1,), temperature=0.0, min_tokens=1, end_token_ids=(0,))
    assert sample(values, [early], KERNELS) == [1]
    assert sample(values, [late], KERNELS) == [0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 1_048_576))
def test_uniform_is_in_range_and_repeatable(seed, position):
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


def test_logprobs_are_those_of_the_model():
    values = logits(2)
    found = token_logprobs(values, [3, 4], 5)
    want = torch.log_softmax(values, -1)
    assert found[0].logprob == pytest.approx(want[0, 3].item(), abs=1e-6)
    assert [token for token, _ in found[1].top] == want[1].topk(5).indices.tolist()
    assert found[0].rank == int((want[0] > want[0, 3]).sum()) + 1
    assert math.fsum(math.exp(p) for _, p in found[0].top) < 1


def mask_of(*tokens, vocabulary=50):
    bits = bytearray(4 * -(-vocabulary // 32))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return allowed_tokens(bytes(bits), vocabulary, torch.device("cpu"))


@given(st.sets(st.integers(0, 69)), st.integers(1, 100))
def test_a_mask_is_read_bit_by_bit_and_padding_is_not_allowed(tokens, vocabulary):
    bits = bytearray(12)
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    found = allowed_tokens(bytes(bits), vocabulary, torch.device("cpu"))
    assert found.nonzero().flatten().tolist() == sorted(t for t in tokens if t < vocabulary)
    assert not allowed_tokens(b"", vocabulary, torch.device("cpu")).any()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {}])
def test_only_allowed_tokens_are_drawn_whatever_the_truncation(params):
    values = logits()
    worst = values[0].argsort()[:4].tolist()
    rows = [
        replace(row(seed=seed, **{"temperature": 1.0, **params}), allowed_V=mask_of(*worst))
        for seed in range(100)
    ]
    drawn = set(sample(values.expand(100, -1), rows, KERNELS))
    assert drawn <= set(worst)
    if params == {"temperature": 0.0}:
        assert drawn == {worst[-1]}  # the likeliest of the allowed ones


def test_a_bias_and_a_penalty_do_not_lift_a_mask():
    values = logits()
    biased = row(temperature=0.0, logit_bias={9: 100.0}, presence_penalty=-2.0, output=(9,))
    assert sample(values, [replace(biased, allowed_V=mask_of(3))], KERNELS) == [3]


def test_a_grammar_at_its_end_ends_a_text_before_its_least_length():
    short = row(temperature=0.0, min_tokens=5, end_token_ids=(7,))
    values = logits()
    values[0, 7] = 50.0
    assert sample(values, [replace(short, allowed_V=mask_of(7))], KERNELS) == [7]
    assert sample(values, [replace(short, allowed_V=mask_of(7, 4))], KERNELS) == [4]


def test_a_masked_row_leaves_its_neighbours_alone():
    values = logits(2)
    rows = [row(temperature=0.0), replace(row(temperature=0.0), allowed_V=mask_of(1, 2))]
    assert sample(values, rows, KERNELS)[0] == values[0].argmax().item()
