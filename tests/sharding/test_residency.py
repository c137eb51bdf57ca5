"""Which weights stay: as much as a budget allows; one too small is refused with the least."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.errors import OutOfBudget
from firstlight.sharding.residency import (
    BUFFERS,
    LEAST_SLOTS,
    RankWeights,
    image_offsets,
    least_budget,
    plan_residency,
)

SIZES = st.integers(1, 500)


@st.composite
def rank_weights(draw: st.DrawFn) -> RankWeights:
    layers = draw(st.lists(SIZES, min_size=1, max_size=9))
    experts = draw(st.sampled_from([0, 1, 2, 5]))
    return RankWeights(
        outside=draw(SIZES),
        layers=tuple(layers),
        images=tuple(image_offsets([size])[1] for size in layers),
        experts=tuple(experts if draw(st.booleans()) else 0 for _ in layers),
        expert_bytes=draw(SIZES) if experts else 0,
    )


@given(rank_weights(), st.floats(0, 1.1))
def test_a_plan_is_within_its_budget_or_refused_with_the_least(
    weights: RankWeights, share: float
) -> None:
    budget, least = int(share * weights.num_bytes), least_budget(weights)
    if budget < least:
        with pytest.raises(OutOfBudget, match=f"at least {least} bytes"):
            plan_residency(weights, budget)
        return
    plan = plan_residency(weights, budget)
    assert plan.num_bytes <= budget
    streamed = sum(weights.layers[layer] for layer in plan.streamed)
    held = weights.outside + sum(weights.layers) - streamed + plan.num_buffers * plan.buffer_bytes
    slots = sum(weights.experts) if plan.is_whole else plan.num_slots
    assert plan.num_bytes == held + slots * weights.expert_bytes
    assert plan.is_whole == (weights.num_bytes <= budget)
    assert all(weights.images[layer] <= plan.buffer_bytes for layer in plan.streamed)
    if plan.streamed:
        assert plan.num_buffers == BUFFERS < len(plan.streamed)
    if sum(weights.experts) and not plan.is_whole:
        assert min(LEAST_SLOTS, sum(weights.experts)) <= plan.num_slots <= sum(weights.experts)


@given(rank_weights(), st.integers(0, 5000), st.integers(0, 5000))
def test_more_memory_never_streams_more(weights: RankWeights, one: int, other: int) -> None:
    least = least_budget(weights)
    plans = [plan_residency(weights, least + extra) for extra in sorted((one, other))]
    moved = [sum(weights.layers[layer] for layer in plan.streamed) for plan in plans]
    assert moved[1] <= moved[0]


def test_what_streams_is_spread_over_the_layers() -> None:
    weights = RankWeights(10, (64,) * 12, (64,) * 12, (0,) * 12, 0)
    plan = plan_residency(weights, weights.num_bytes - 64)
    assert plan.streamed == (2, 6, 10)
