"""Times of what lies outside the device: which bytes count, and which way they go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.constants import (
    EXPECTED,
    FAR_LAYER_SECONDS,
    FAR_RATE,
    FAR_UNIT_SECONDS,
)
from firstlight.planning.cost import CostModel, Step
from firstlight.planning.far_times import far_times
from firstlight.planning.hardware import Fleet, parse_fleet
from firstlight.planning.memory import plan_memory
from firstlight.planning.rates import rates_of
from firstlight.planning.reading import summaries_read, tokens_fetched, tokens_read
from firstlight.planning.work import planned_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.attention_pattern import FULL, parse_attention
from firstlight.sharding.layout import Layout
from firstlight.sharding.state_spec import GroupedQueryState, LatentState, RecurrentState

PAGE = 16
LOAD = Workload(context=4096, concurrency=1, input_tokens=1000, output_tokens=16)


def timed(spec, attention="full", tiers="host=2MiB,disk=/x:64MiB", load=LOAD):
    """Times on a device with no more room than a sequence needs there, and its memory plan."""
    rules = PlanRules(
        chunk_tokens=64, max_batch_tokens=64, attention=attention, tiers=tiers, reserve_share=0.0
    )
    work, at, fleet = planned_work(spec, rules), Arrangement(Layout()), parse_fleet("1xB300")

    def sized(memory):
        figure = structs.replace(fleet.device.memory, value=float(memory))
        return Fleet(1, structs.replace(fleet.device, memory=figure), 1)

    least = sized(plan_memory(work, at, sized(1), load, rules).worst.used)
    memory = plan_memory(work, at, least, load, rules)
    return far_times(work, memory, least, load, rules), memory


def test_full_attention_reads_every_page_outside_the_device_for_a_token(dense):
    times, memory = timed(dense)
    layer = 2 * 2 * 16 * 2 * PAGE  # keys and values of two heads of 16 channels in bf16
    pages = sum(times.beyond)
    assert pages == 4096 // PAGE - memory.places.device_blocks > 0
    assert times.read_bytes == 5 * pages * layer
    assert times.reading == pytest.approx(
        5 * pages * FAR_LAYER_SECONDS + times.read_bytes / FAR_RATE
    )
    assert times.token >= times.reading


def test_chosen_blocks_are_a_small_part_and_windows_none(dense):
    whole, some, none = (
        timed(dense, attention)[0].read_bytes
        for attention in ("full", "sparse=16x4", "window=64,sinks=16")
    )
    assert 0 == none < some < whole / 4


def test_a_found_prompt_costs_its_pages_and_its_last_token(dense, mini):
    for spec, units in ((dense, 1000 // PAGE), (mini, 1000 // PAGE + 1)):
        load = LOAD if spec is dense else Workload(**{**vars(LOAD), "context": 1024})
        times, memory = timed(spec, tiers="host=64MiB,disk=/x:64MiB", load=load)
        host, disk = times.warm["host"], times.warm["disk"]
        assert host.tokens == disk.tokens == 1000 // PAGE * PAGE
        assert units * FAR_UNIT_SECONDS < host.seconds <= disk.seconds
        snapshot = memory.stages[0].sequence.get("recurrent", 0)
        paged = sum(memory.stages[0].sequence.values()) - snapshot
        assert host.num_bytes == paged * (1000 // PAGE) // (load.context // PAGE) + snapshot


def test_a_place_too_small_for_the_prompt_gives_no_hit(dense):
    assert "host" not in timed(dense, tiers="host=100KiB,disk=/x:64MiB")[0].warm


def test_prompts_of_latent_attention_take_longer_where_pages_may_lie_elsewhere(k3):
    """One form of the arithmetic, whose pairs take 2 x (576 + 512) against 2 x (192 + 128)."""
    step = Step(2048, 1, 100_000.0, prompt=True)
    spent = []
    for rules in (PlanRules(), PlanRules(tiers="host=64GiB")):
        work = planned_work(k3, rules)
        rates = rates_of(parse_fleet("8xB300"), EXPECTED, rules.dtype)
        model = CostModel(work, Arrangement(Layout(tp=8)), rates, 2)
        (latent,) = (k for k in work.kinds if k.state.kind == "latent" and k.has_experts)
        (recurrent,) = (k for k in work.kinds if k.state.kind != "latent" and k.has_experts)
        assert latent.absorbs == bool(rules.tiers) and not recurrent.absorbs
        spent.append(model.layer(latent, step).attention)
    # Expanded, keys and values of the past are made again, 2 x 512 x (128 + 128) a token and head.
    again = 2 * 512 * 256 * 100_000 / (101_024 * 2048)
    assert spent[1] / spent[0] == pytest.approx(2 * 1088 / (2 * 320 + again), rel=0.01)


STATES = st.sampled_from(
    [
        LatentState(16, summary_tokens=16),
        GroupedQueryState(4, 16, summary_tokens=16),
        GroupedQueryState(4, 16, window=100, sinks=16),
        RecurrentState(2, 4, 4, 24, 3),
    ]
)
SPARSE = parse_attention("sparse=32x4,recent=64,sinks=32")[0].pattern


@given(state=STATES, past=st.integers(0, 10_000), share=st.floats(0, 1), sparse=st.booleans())
def test_no_more_is_read_than_there_is(state, past, share, sparse):
    pattern = SPARSE if sparse and getattr(state, "window", 1) is None else FULL
    beyond = int(past * share)
    read = tokens_read(state, pattern, past)
    fetched = tokens_fetched(state, pattern, past, beyond, tp=1)
    assert 0 <= read <= past and 0 <= fetched <= beyond
    if pattern.is_sparse:
        heads = 4 if isinstance(state, GroupedQueryState) else 1
        assert fetched <= 32 + heads * 4 * 32 + 1e-6 or past <= 32 + 64
        assert summaries_read(state, past) == past / 16
