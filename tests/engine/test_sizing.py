"""How many cache blocks an engine takes, and what it says when they do not suffice."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import DEFAULT_LIMIT, CacheNeeds, cache_needs, num_blocks
from firstlight.errors import OutOfBudget, UsageError
from firstlight.models.spec import read_model_spec
from tiny_models import tiny_config

SPEC = read_model_spec(tiny_config("llama3"))
# 4 layers of 2 KV heads of 8 channels, keys and values in fp32.
TOKEN_BYTES = 4 * 2 * 8 * 2 * 4


def needs(context: int = 512, sequences: int = 4, tp: int = 1, block: int = 16) -> CacheNeeds:
    return CacheNeeds(SPEC.states, block, tp, 4, sequences, context)


def test_bytes_of_a_block_count_every_layer_and_shrink_with_the_ranks() -> None:
    assert needs().block_bytes == 16 * TOKEN_BYTES
    assert needs(tp=2).block_bytes == 8 * TOKEN_BYTES
    assert needs(tp=4).block_bytes == 8 * TOKEN_BYTES  # two KV heads: pairs of ranks share one


def test_no_more_blocks_than_all_sequences_can_fill() -> None:
    assert num_blocks(needs(), available=10**12, budget=None) == 4 * 32 + 1
    assert num_blocks(needs(), available=10**12, budget=10**9) == 4 * 32 + 1


def test_without_a_budget_a_fifth_of_the_memory_and_all_beyond_the_limit_is_left() -> None:
    many = needs(sequences=10**6)
    assert num_blocks(many, available=10**9, budget=None) == int(0.8e9) // many.block_bytes
    assert num_blocks(many, available=10**13, budget=None) == DEFAULT_LIMIT // many.block_bytes


def test_a_cache_without_room_for_one_sequence_is_refused_with_ways_out() -> None:
    with pytest.raises(OutOfBudget) as refused:
        num_blocks(needs(), available=10**12, budget=20 * needs().block_bytes)
    text = str(refused.value)
    fits = int(re.findall(r"lower the context to (\d+) tokens", text)[0])
    assert "512 tokens needs" in text and fits == 19 * 16
    assert num_blocks(needs(context=fits), available=10**12, budget=20 * needs().block_bytes) == 20


def test_a_budget_beyond_the_memory_there_is_is_refused_unless_less_is_taken() -> None:
    taken = (4 * 32 + 1) * needs().block_bytes
    assert num_blocks(needs(), available=taken, budget=2 * taken) == 4 * 32 + 1
    with pytest.raises(OutOfBudget, match="max_sequences"):
        num_blocks(needs(), available=taken - 1, budget=2 * taken)


@given(st.integers(1, 5000), st.integers(1, 100), st.integers(1, 64), st.integers(0, 10**8))
def test_a_cache_that_is_granted_holds_a_sequence_within_its_budget(
    context: int, sequences: int, block: int, budget: int
) -> None:
    wanted = needs(context, sequences, block=block)
    try:
        blocks = num_blocks(wanted, available=10**12, budget=budget)
    except OutOfBudget:
        assert budget < (wanted.blocks_per_sequence + 1) * wanted.block_bytes
        return
    assert blocks * wanted.block_bytes <= budget
    assert (blocks - 1) * block >= context  # block 0 is nobody's


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(model="m", started=0, api_endpoint="", engine_endpoint="", **changes)  # type: ignore[arg-type]


def test_the_context_is_the_models_own_unless_a_shorter_one_is_asked() -> None:
    assert cache_needs(settings(), SPEC).context_length == 512
    assert cache_needs(settings(context_length=100), SPEC).context_length == 100
    with pytest.raises(UsageError, match="context 513 exceeds the model's 512"):
        cache_needs(settings(context_length=513), SPEC)


def test_half_precision_takes_half() -> None:
    half = cache_needs(settings(dtype="bfloat16"), SPEC)
    assert half.block_bytes * 2 == cache_needs(settings(), SPEC).block_bytes
