from dataclasses import replace
from pathlib import Path

import pytest

from firstlight.engine.sizing import CacheNeeds
from firstlight.errors import OutOfBudget
from firstlight.planning.tier_sizing import plan_tiers, tier_bytes
from firstlight.settings.tiers import TierSettings
from firstlight.sharding.state_spec import GroupedQueryState, LatentState, RecurrentState

HYBRID = (RecurrentState(2, 4, 4, 24, 3), LatentState(8), GroupedQueryState(2, 4))


def needs(*states: object) -> CacheNeeds:
    return CacheNeeds(states, 16, 1, 4, max_sequences=4, context_length=256)


def test_every_tier_is_used_and_none_exceeded() -> None:
    asked = TierSettings(100_000, 1_000_000, Path("/x"))
    sizes = plan_tiers(HYBRID, needs(*HYBRID).unit_bytes, asked)
    held = tier_bytes(sizes, needs(*HYBRID).unit_bytes)
    page = sum(needs(*HYBRID).unit_bytes[1:])
    for budget, used in zip((100_000, 1_000_000), held, strict=True):
        assert budget - page < used <= budget
    assert sizes[1] == sizes[2] and min(sizes[0]) >= 1


def test_without_tiers_there_are_none() -> None:
    assert plan_tiers(HYBRID, needs(*HYBRID).unit_bytes, TierSettings()) == () and tier_bytes(
        (), ()
    ) == (0, 0)


def test_a_tier_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(OutOfBudget, match="tiers: disk holds 100 B on each rank"):
        plan_tiers(HYBRID, needs(*HYBRID).unit_bytes, TierSettings(0, 100, Path("/x")))


def test_what_lies_outside_need_not_fit_into_the_device() -> None:
    whole = CacheNeeds(HYBRID, 16, 1, 4, 4, 4096, chunk_tokens=64)
    assert whole.least_blocks == 256
    assert replace(whole, far_pages=100).least_blocks == 156
    assert replace(whole, far_pages=10_000).least_blocks == 10
    assert replace(whole, far_pages=10_000, chunk_tokens=4096).least_blocks == 256
