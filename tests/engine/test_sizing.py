"""How many cache blocks an engine takes, and what it says when they do not suffice."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.paged_group import most_blocks_held
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import (
    DEFAULT_LIMIT,
    CacheNeeds,
    CachePlan,
    cache_needs,
    default_budget,
    plan_caches,
)
from firstlight.errors import OutOfBudget, UsageError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    StateSpec,
)
from tiny_models import tiny_config

SPEC = read_model_spec(tiny_config("llama3"))
# 4 layers of 2 KV heads of 8 channels, keys and values in fp32.
TOKEN_BYTES = 4 * 2 * 8 * 2 * 4


def needs(context: int = 512, sequences: int = 4, tp: int = 1, block: int = 16) -> CacheNeeds:
    return CacheNeeds(SPEC.states, block, tp, 4, sequences, context)


def num_blocks(wanted: CacheNeeds, *, available: int, budget: int | None) -> int:
    plan = plan_caches(wanted, available=available, budget=budget)
    assert plan.num_bytes == plan.paged_bytes == plan.num_blocks * wanted.paged_bytes(1)
    assert plan.num_slots == 0
    return plan.num_blocks


def test_bytes_of_a_block_count_every_layer_and_shrink_with_the_ranks() -> None:
    assert needs().paged_bytes(1) == 16 * TOKEN_BYTES
    assert needs(tp=2).paged_bytes(1) == 8 * TOKEN_BYTES
    assert needs(tp=4).paged_bytes(1) == 8 * TOKEN_BYTES  # two KV heads: pairs of ranks share one


def test_no_more_blocks_than_all_sequences_can_fill() -> None:
    assert num_blocks(needs(), available=10**12, budget=None) == 4 * 32 + 1
    assert num_blocks(needs(), available=10**12, budget=10**9) == 4 * 32 + 1


def test_without_a_budget_a_fifth_of_the_memory_and_all_beyond_the_limit_is_left() -> None:
    many = needs(sequences=10**6)
    assert num_blocks(many, available=10**9, budget=None) == int(0.8e9) // many.paged_bytes(1)
    assert num_blocks(many, available=10**13, budget=None) == DEFAULT_LIMIT // many.paged_bytes(1)


def test_a_cache_without_room_for_one_sequence_is_refused_with_ways_out() -> None:
    with pytest.raises(OutOfBudget) as refused:
        num_blocks(needs(), available=10**12, budget=20 * needs().paged_bytes(1))
    text = str(refused.value)
    fits = int(re.findall(r"lower the context to (\d+) tokens", text)[0])
    assert "512 tokens needs" in text and fits == 19 * 16
    assert (
        num_blocks(needs(context=fits), available=10**12, budget=20 * needs().paged_bytes(1)) == 20
    )


def test_a_budget_beyond_the_memory_there_is_is_refused_unless_less_is_taken() -> None:
    taken = (4 * 32 + 1) * needs().paged_bytes(1)
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
        assert budget < (wanted.blocks_per_sequence + 1) * wanted.paged_bytes(1)
        return
    assert blocks * wanted.paged_bytes(1) <= budget
    assert (blocks - 1) * block >= context  # block 0 is nobody's


# Kimi K3: 69 layers of delta attention, 24 of latent attention, bf16 (fp32 matrices).
KIMI_K3: tuple[StateSpec, ...] = (
    *[RecurrentState(96, 128, 128, conv_channels=3 * 96 * 128, conv_taps=3)] * 69,
    *[LatentState(512 + 64)] * 24,
)


def kimi(tp: int = 1, context: int = 8192, sequences: int = 4) -> CacheNeeds:
    return CacheNeeds(KIMI_K3, 64, tp, 2, sequences, context)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_the_state_of_kimi_k3_divides_by_the_ranks_and_its_latents_do_not(tp: int) -> None:
    assert kimi(tp).slot_bytes * tp == 449_372_160
    assert kimi(tp).paged_bytes(1) == 64 * 27_648
    assert kimi(tp).paged_bytes_by_kind(1) == {"latent": 64 * 27_648}
    assert kimi(tp, context=2**20).blocks_per_sequence * kimi().paged_bytes(1) == 28_991_029_248


def test_live_slots_come_first_then_a_sequence_then_snapshots_then_blocks() -> None:
    wanted = kimi()
    live, sequence = 5 * 449_372_160, 129 * 64 * 27_648
    least = plan_caches(wanted, available=10**12, budget=live + sequence)
    assert least == CachePlan(129, 5, sequence, live)
    # A quarter of what live slots leave, but no more than one snapshot a sequence.
    for left, snapshots in ((4 * 449_372_160, 1), (8 * 449_372_160 - 1, 1), (10**12, 4)):
        plan = plan_caches(wanted, available=10**13, budget=live + left)
        assert plan.num_slots == 5 + snapshots
        rest = left - snapshots * 449_372_160
        assert plan.num_blocks == min(4 * 128 + 1, rest // (64 * 27_648))


def test_live_slots_that_do_not_fit_are_refused_with_ways_out_that_are_ways_out() -> None:
    wanted, budget = kimi(sequences=16), 4 * 1024**3
    with pytest.raises(OutOfBudget) as refused:
        plan_caches(wanted, available=10**12, budget=budget)
    text = str(refused.value)
    assert "of 16 sequences needs 7.11 GiB on each rank (429 MiB a sequence" in text
    enough = int(re.findall(r"budget to (\d+) bytes", text)[0])
    assert plan_caches(wanted, available=10**12, budget=enough).num_bytes == enough
    sequences = int(re.findall(r"lower max_sequences to (\d+)", text)[0])
    assert plan_caches(kimi(sequences=sequences), available=10**12, budget=budget)
    with pytest.raises(OutOfBudget):
        plan_caches(kimi(sequences=sequences + 1), available=10**12, budget=budget)
    assert "lower the context" not in text  # no context is short enough


def test_a_context_that_does_not_fit_beside_live_slots_is_refused_with_both_ways_out() -> None:
    budget = 3 * 1024**3
    told = "beside 2[.]09 GiB for the recurrent state of 4"
    with pytest.raises(OutOfBudget, match=told) as refused:
        plan_caches(kimi(context=2**16), available=10**12, budget=budget)
    tokens = int(re.findall(r"lower the context to (\d+) tokens", str(refused.value))[0])
    sequences = int(re.findall(r"lower max_sequences to (\d+)", str(refused.value))[0])
    assert plan_caches(kimi(context=tokens), available=10**12, budget=budget).num_slots == 5
    assert plan_caches(kimi(context=2**16, sequences=sequences), available=10**12, budget=budget)


hybrids = st.builds(
    CacheNeeds,
    states=st.just(KIMI_K3),
    block_size=st.sampled_from([1, 16, 64]),
    tp=st.sampled_from([1, 8]),
    element_bytes=st.sampled_from([2, 4]),
    max_sequences=st.integers(1, 40),
    context_length=st.integers(1, 2**20),
)


@given(hybrids, st.integers(0, 10**11))
def test_a_split_keeps_its_promises_within_its_budget(wanted: CacheNeeds, budget: int) -> None:
    least = (wanted.max_sequences + 1) * wanted.slot_bytes
    least += (wanted.blocks_per_sequence + 1) * wanted.paged_bytes(1)
    try:
        plan = plan_caches(wanted, available=10**12, budget=budget)
    except OutOfBudget:
        assert budget < least
        return
    assert least <= plan.num_bytes <= budget
    assert plan.slot_bytes == plan.num_slots * wanted.slot_bytes
    assert plan.paged_bytes == plan.num_blocks * wanted.paged_bytes(1)
    assert wanted.max_sequences < plan.num_slots <= 2 * wanted.max_sequences + 1
    assert plan.num_blocks > wanted.blocks_per_sequence


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(model="m", started=0, api_endpoint="", engine_endpoint="", **changes)  # type: ignore[arg-type]


def test_the_context_is_the_models_own_unless_a_shorter_one_is_asked() -> None:
    assert cache_needs(settings(), SPEC).context_length == 512
    assert cache_needs(settings(context_length=100), SPEC).context_length == 100
    with pytest.raises(UsageError, match="context 513 exceeds the model's 512"):
        cache_needs(settings(context_length=513), SPEC)


def test_half_precision_takes_half() -> None:
    half = cache_needs(settings(dtype="bfloat16"), SPEC)
    assert half.paged_bytes(1) * 2 == cache_needs(settings(), SPEC).paged_bytes(1)


WINDOWED = (GroupedQueryState(8, 128), GroupedQueryState(8, 128, window=4096))


def windowed(
    states: tuple[StateSpec, ...] = WINDOWED, context: int = 2**17, sequences: int = 2
) -> CacheNeeds:
    return CacheNeeds(states, 16, 1, 2, sequences, context, chunk_tokens=512)


def test_layers_with_a_window_are_charged_at_window_size() -> None:
    held = most_blocks_held(4096, 512, 16)
    assert held == (4096 + 512) // 16 + 1
    plan = plan_caches(windowed(), available=10**13, budget=10**12)
    assert plan.num_blocks == 2 * 2**17 // 16 + 1
    assert plan.window_blocks == {4096: 2 * held + 1}
    token = 2 * 8 * 128 * 2
    assert plan.paged_bytes == token * 16 * (plan.num_blocks + 2 * held + 1)


def test_a_short_context_is_charged_in_full() -> None:
    plan = plan_caches(windowed(context=2048), available=10**13, budget=10**12)
    assert plan.window_blocks == {} and plan.num_blocks == 2 * 128 + 1


@given(
    context=st.integers(1, 2**20), sequences=st.integers(1, 9), budget=st.integers(10**6, 10**11)
)
def test_blocks_of_windows_keep_within_the_budget_and_use_it(
    context: int, sequences: int, budget: int
) -> None:
    wanted = windowed(context=context, sequences=sequences)
    try:
        plan = plan_caches(wanted, available=10**12, budget=budget)
    except OutOfBudget:
        assert budget < wanted.least_paged_bytes
        return
    assert wanted.least_paged_bytes <= plan.paged_bytes <= budget
    most = sequences * wanted.blocks_per_sequence + 1
    assert plan.num_blocks == most or wanted.paged_bytes(plan.num_blocks + 1) > budget


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_caches_of_bytes_take_at_most_53_hundredths_of_bf16(kv_dtype: str) -> None:
    smollm2, k3 = [GroupedQueryState(3, 64)] * 30, [LatentState(576)] * 24
    for states in (smollm2, k3, list(WINDOWED)):
        half = CacheNeeds(states, 16, 1, 2, 4, 4096)
        byte = CacheNeeds(states, 16, 1, 2, 4, 4096, kv_dtype=kv_dtype)
        assert 0.5 < byte.paged_bytes(1) / half.paged_bytes(1) <= 0.53


def test_memory_of_an_accelerator_is_taken_whole_but_for_the_reserve():
    gib = 2**30
    assert default_budget(40 * gib) == DEFAULT_LIMIT
    assert default_budget(40 * gib, owned=True) == 32 * gib
    assert default_budget(2 * gib) == default_budget(2 * gib, owned=True) == int(1.6 * gib)
