"""Where a plan lays caches, against what an engine of the same settings sizes and allocates."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cached_sequence import Sequence
from firstlight.cache.block_pool import NULL_BLOCK
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.manager import CacheManager, distinct_specs
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import cache_needs, plan_caches
from firstlight.errors import UsageError
from firstlight.models.spec import with_attention
from firstlight.planning.arrangement import Arrangement
from firstlight.planning.cache_places import plan_places
from firstlight.planning.caches import (
    CacheNeed,
    cache_bytes,
    most_device_blocks,
    sequence_bytes,
)
from firstlight.planning.hardware import Fleet, parse_fleet
from firstlight.planning.memory import plan_memory
from firstlight.planning.tier_sizing import plan_tiers, unit_bytes_of
from firstlight.planning.work import planned_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.runner.cache_tensors import CacheShape, allocate_states, state_bytes
from firstlight.runner.open_tiers import make_store
from firstlight.settings.tiers import TierSettings, parse_tiers
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import SUMMARY_BYTES

ATTENTION = ("full", "window=24,sinks=4", "sparse=8x3")


def engine_settings(**given):
    return EngineSettings(
        **{"model": "m", "started": 0, "api_endpoint": "", "engine_endpoint": "", **given}
    )


def planned(spec, rules, *, tp=1, context=1024, sequences=2, room=0):
    """The memory of a rank whose device has `room` bytes beyond what a plan needs at least."""
    load = Workload(context=context, concurrency=sequences, input_tokens=64, output_tokens=16)
    work, at = planned_work(spec, rules), Arrangement(Layout(tp=tp))
    fleet = parse_fleet(f"{tp}xB300")
    needed = plan_memory(work, at, sized(fleet, 1), load, rules).worst.used
    return plan_memory(work, at, sized(fleet, needed + room), load, rules)


def sized(fleet, memory):
    figure = structs.replace(fleet.device.memory, value=float(memory))
    return Fleet(fleet.count, structs.replace(fleet.device, memory=figure), fleet.island)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("tiers", ["", "host=1MiB", "host=100KiB,disk=/x:2MiB"])
@pytest.mark.parametrize(("name", "tp"), [("mini", 1), ("dense", 1), ("dense", 2), ("windowed", 1)])
def test_an_engine_of_the_planned_budget_holds_as_many_tokens(request, name, tiers, attention, tp):
    spec = request.getfixturevalue(name)
    context = spec.context_length if name == "windowed" else 1024
    rules = PlanRules(
        dtype="float32", block_size=8, chunk_tokens=32, attention=attention, tiers=tiers
    )
    plan = planned(spec, replace(rules, reserve_share=0.0), tp=tp, context=context, room=60_000)
    assert plan.fits
    stage, places = plan.stages[0], plan.places
    asked = engine_settings(
        **{"tp": tp, "block_size": 8, "chunk_tokens": 32, "max_sequences": 2, "tiers": tiers},
        **{"context_length": context},
    )
    patterned = with_attention(spec, attention, 8)
    needs = cache_needs(asked, patterned)
    budget = stage.components["kv"]
    made = plan_caches(needs, available=budget, budget=budget)
    far = plan_tiers(needs.states, needs.unit_bytes, parse_tiers(tiers))
    options = CacheOptions(32, made.window_blocks, unit_bytes=needs.unit_bytes, far=far)
    cache = CacheManager(
        distinct_specs(needs.states),
        num_blocks=made.num_blocks,
        block_size=8,
        model_digest="m",
        num_slots=made.num_slots,
        options=options,
    )
    held = sum(places.tokens.values())
    if attention == "window=24,sinks=4":
        assert cache.can_ever_fit(context)
    elif needs.slot_bytes:  # of what snapshots do not get an engine makes blocks
        assert context <= held <= cache.max_tokens
        assert made.num_bytes <= budget
    else:
        assert context <= held == cache.max_tokens and made.num_bytes == budget


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["mini", "dense"])
def test_tiers_take_on_the_device_what_was_planned(request, name, attention, kv_dtype):
    """Summaries of pages elsewhere, and buffers once every group has read through them."""
    states = with_attention(request.getfixturevalue(name), attention, 8).states
    need = CacheNeed(states, 1, 4, 8, 1, 256, chunk_tokens=32, kv_dtype=kv_dtype)
    tiers = TierSettings(host_bytes=200_000)
    sizes = plan_tiers(states, unit_bytes_of(states, need.cut), tiers)
    places = plan_places(need, tiers, available=0)
    shape = CacheShape(9, 8, 1, torch.float32, torch.device("cpu"), 3, kv_dtype=kv_dtype)
    near = allocate_states(states, shape)
    store, far = make_store(near, sizes, folder="", layout={"block_size": 8})
    readers = {
        id(state.far): state
        for spec, state in zip(states, far, strict=True)
        if getattr(spec, "window", 1) is None
    }
    for state in readers.values():
        state.far.staging(state.layer)
    buffers = sum(state.far.staging_bytes for state in readers.values())
    assert places.tiers_bytes == state_bytes(far) - state_bytes(near) + buffers
    assert bool(buffers) == (attention != "window=24,sinks=4")
    store.close()


needs_of = st.builds(
    CacheNeed,
    states=st.just(()),
    tp=st.sampled_from([1, 2]),
    element_bytes=st.just(4),
    block_size=st.sampled_from([1, 4, 16]),
    sequences=st.integers(1, 4),
    context=st.integers(1, 300),
    chunk_tokens=st.sampled_from([None, 8, 100]),
    kv_dtype=st.sampled_from(["auto", "int8"]),
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["mini", "dense", "windowed"]), need=needs_of, limit=st.integers(0, 10**7)
)
def test_a_device_gets_as_many_blocks_as_there_is_room_for(request, name, need, limit):
    need = replace(need, states=request.getfixturevalue(name).states)
    found = most_device_blocks(need, limit, least=1)
    taken, more = (sum(cache_bytes(need, number).values()) for number in (found, found + 1))
    assert 1 <= found <= need.all_blocks
    assert taken <= limit or found == 1
    assert more > limit or found == need.all_blocks


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["mini", "dense", "windowed"])
def test_a_sequence_takes_what_a_cache_gives_it_at_most(request, name, attention, kv_dtype):
    """Computed chunk by chunk; blocks that are given back behind a window count no more."""
    states = with_attention(request.getfixturevalue(name), attention, 8).states
    need = CacheNeed(states, 1, 4, 8, 3, 200, chunk_tokens=24, kv_dtype=kv_dtype)
    cache = CacheManager(
        groups := distinct_specs(states),
        num_blocks=26,
        block_size=8,
        model_digest="m",
        num_slots=2,
        options=CacheOptions(24),
    )
    sequence, most = Sequence("a", list(range(200))), [0] * len(groups)
    for end in (*range(24, 200, 24), 200):
        assert cache.grow(sequence, end) is not None
        held = [len(set(table) - {NULL_BLOCK}) for table in cache.blocks(sequence)]
        most = [max(pair) for pair in zip(most, held, strict=True)]
        sequence.num_computed = end
        cache.commit(sequence, end)
    units = unit_bytes_of(states, need.cut)
    expected = sum(sequence_bytes(need).values())
    taken = sum(n * size for n, size in zip(most, units, strict=True))
    if any(getattr(state, "window", None) for state in states):
        assert taken <= expected <= taken + 2 * sum(units)  # wherever blocks begin
    else:
        assert taken == expected


def test_kimi_k3_at_a_million_tokens_by_hand(k3):
    """27,648 bytes a token, 449 MB of state; and what windows and summaries make of them."""
    need = CacheNeed(k3.states, 1, 2, 64, 1, 2**20, chunk_tokens=2048)
    assert sequence_bytes(need) == {"latent": 27_648 * 2**20, "recurrent": 449_372_160}
    sparse = with_attention(k3, "sparse=64x32", 64).states
    latent = sequence_bytes(replace(need, states=sparse))["latent"]
    assert latent == 27_648 * 2**20 + 2**14 * 24 * 576 * SUMMARY_BYTES
    window = with_attention(k3, "window=4096,sinks=64", 64).states
    blocks = (4096 + 2048) // 64 + 1 + 1  # the window, a chunk, a block begun, the sinks
    assert sequence_bytes(replace(need, states=window))["latent"] == blocks * 64 * 27_648


def test_no_page_of_a_sequence_is_counted_twice_or_not_at_all(dense):
    sizes = {"block_size": 8, "chunk_tokens": 32}
    rules = PlanRules(dtype="float32", **sizes, tiers="host=64KiB,disk=/x:8MiB")
    places = planned(dense, rules, context=2048, sequences=1, room=0).places
    beyond = places.beyond(2048)
    assert beyond.host == places.far_pages.host > 0 and beyond.disk > 0
    assert sum(beyond) + places.device_blocks == math.ceil(2048 / 8)
    assert sum(places.beyond(places.device_blocks * 8)) == 0


def test_ranks_that_share_a_cache_have_no_tiers():
    with pytest.raises(UsageError, match="tiers and context_parallel exclude"):
        PlanRules(tiers="host=1GiB", context_parallel=True)
