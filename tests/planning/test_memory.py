from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.sizing import CacheNeeds, plan_caches
from firstlight.planning.activations import encoder_bytes
from firstlight.planning.arrangement import Arrangement, arrangements
from firstlight.planning.caches import (
    CacheNeed,
    HeldCaches,
    cache_bytes,
    held_cache_bytes,
    recurrent_bytes,
)
from firstlight.planning.hardware import parse_fleet
from firstlight.planning.memory import plan_memory
from firstlight.planning.search import most_context, most_sequences
from firstlight.planning.workload import PlanRules, Workload
from firstlight.runner.cache_tensors import CacheShape, allocate_states, state_bytes
from firstlight.sharding.layout import Layout

FLEET = parse_fleet("8xS5000@8")
RULES = PlanRules()
MILLION = 1024 * 1024


def test_state_of_one_kimi_k3_sequence(k3):
    assert recurrent_bytes(k3.states, tp=1, element_bytes=2) == 449_372_160
    assert recurrent_bytes(k3.states, tp=8, element_bytes=2) == 449_372_160 // 8


def test_caches_of_one_kimi_k3_sequence_of_a_million_tokens(k3):
    need = CacheNeed(k3.states, 1, 2, block_size=16, sequences=1, context=MILLION)
    sizes = cache_bytes(need)
    null_block = 24 * 576 * 2 * 16
    assert sizes["latent"] - null_block == 28_991_029_248
    one_sequence = sizes["latent"] - null_block + recurrent_bytes(k3.states, 1, 2)
    assert round(one_sequence / 1e9, 2) == 29.44


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["mini", "dense", "windowed"]),
    tp=st.sampled_from([1, 2]),
    sequences=st.integers(1, 9),
    context=st.integers(1, 700),
    block_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([None, 1, 8, 100]),
    kv_dtype=st.sampled_from(["auto", "int8", "fp8"]),
)
def test_an_engine_given_the_planned_budget_holds_the_load(
    request, name, tp, sequences, context, block_size, chunk, kv_dtype
):
    """And what its ranks then allocate is what was planned, to the byte."""
    states = request.getfixturevalue(name).states
    more = {"chunk_tokens": chunk, "kv_dtype": kv_dtype}
    need = CacheNeed(states, tp, 4, block_size, sequences, context, **more)
    budget = sum(cache_bytes(need).values())
    needs = CacheNeeds(states, block_size, tp, 4, sequences, context, chunk, kv_dtype)
    plan = plan_caches(needs, available=budget, budget=budget)
    assert plan.num_blocks == sequences * needs.blocks_per_sequence + 1
    assert plan.num_slots >= needs.live_slots
    held = HeldCaches(plan.num_blocks, block_size, plan.num_slots, plan.window_blocks, kv_dtype)
    planned = held_cache_bytes(states, held, tp=tp, element_bytes=4)
    shape = CacheShape(
        *(plan.num_blocks, block_size, tp, torch.float32, torch.device("meta"), plan.num_slots),
        *(plan.window_blocks, kv_dtype),
    )
    assert state_bytes(allocate_states(states, shape)) == sum(planned.values()) == plan.num_bytes
    assert budget >= plan.num_bytes


def memory(work, layout, rules=RULES, **asked):
    load = Workload(**{"context": 2048, "concurrency": 4, "input_tokens": 64, **asked})
    return plan_memory(work, Arrangement(layout), FLEET, load, rules)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), more=st.integers(1, 64))
def test_memory_grows_with_context_concurrency_and_images(mini_work, data, more):
    found = [a.layout for n in (1, 2, 4, 8) for a in arrangements(mini_work.spec, n)]
    layout = data.draw(st.sampled_from(found))
    least = memory(mini_work, layout)
    for name, value in (("context", 2048 + more), ("concurrency", 4 + more), ("images", more)):
        grown = memory(mini_work, layout, **{name: value})
        for before, after in zip(least.stages, grown.stages, strict=True):
            assert all(after.components[c] >= size for c, size in before.components.items())


def test_components_are_found_under_the_names_the_engine_measures(mini_work):
    plan = memory(mini_work, Layout(pp=2))
    assert plan.predicted_bytes("weights/1") == plan.stages[1].components["weights"]
    assert plan.predicted_bytes("kv/0") == plan.stages[0].components["kv"]
    assert sum(plan.stages[0].parts["kv"].values()) == plan.predicted_bytes("kv/0")
    with pytest.raises(KeyError):
        plan.predicted_bytes("spell/0")


def test_logits_are_made_in_the_last_stage_and_images_read_in_the_first(mini_work):
    """Steps of a token each: logits as they come, in fp32, and two copies a choice makes."""
    rules = PlanRules(chunk_tokens=1, max_batch_tokens=1)
    many = (6400, 6402)
    few, more = (memory(mini_work, Layout(pp=2), rules, concurrency=n, images=1) for n in many)
    grown = [
        after.components["activations"] - before.components["activations"]
        for before, after in zip(few.stages, more.stages, strict=True)
    ]
    assert grown == [0, 2 * mini_work.vocab * (2 + 4 + 2 * 4)]
    assert few.stages[0].components["encoder"] > 0 == few.stages[1].components["encoder"]


def test_features_of_images_have_what_the_engine_keeps_for_them_or_more(mini_work):
    rules = PlanRules(encoder_cache_bytes=1 << 20)
    none, one, many = (memory(mini_work, Layout(), rules, images=n).stages[0] for n in (0, 1, 9))
    patches = 1024 * mini_work.vision.patches_per_feature
    beside = encoder_bytes(mini_work, patches)
    features = 1024 * mini_work.hidden * 2
    assert none.components["encoder"] == 1 << 20
    assert one.components["encoder"] == (1 << 20) + beside
    assert many.components["encoder"] == 9 * features + beside > (1 << 20) + beside


def test_a_fifth_of_each_device_is_kept_unless_said_otherwise(mini_work):
    assert memory(mini_work, Layout()).stages[0].components["reserve"] == 16_000_000_000
    rules = PlanRules(reserve_share=0.1)
    load = Workload(context=2048, concurrency=1, input_tokens=64)
    plan = plan_memory(mini_work, Arrangement(Layout()), FLEET, load, rules)
    assert plan.stages[0].components["reserve"] == 8_000_000_000


def test_the_most_that_fits_fits_and_one_more_does_not(k3_work):
    fleet, at = parse_fleet("16xH200@8"), Arrangement(Layout(tp=16))
    load = Workload(context=32 * 1024, concurrency=1)
    rules = PlanRules(reserve_share=0.1)
    most = most_sequences(k3_work, at, fleet, load, rules)
    for number in (most, most + 1):
        asked = replace(load, concurrency=number)
        assert plan_memory(k3_work, at, fleet, asked, rules).fits == (number == most)
    context = most_context(k3_work, at, fleet, load, rules)
    for tokens in (context, context + rules.block_size):
        asked = replace(load, context=tokens)
        assert plan_memory(k3_work, at, fleet, asked, rules).fits == (tokens == context)
