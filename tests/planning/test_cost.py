"""Devices with one limit only turn times into the bytes, FLOP and messages behind them."""

from dataclasses import replace
from math import inf, log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.constants import EXPECTED, MATRIX_SHARE, MEMORY_SHARE, share
from firstlight.planning.cost import CostModel, Step
from firstlight.planning.hardware import parse_fleet
from firstlight.planning.predict import decode_step, encode_seconds, prefill_seconds, speed
from firstlight.planning.rates import Rates, rates_of
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout

PLAIN = replace(EXPECTED, kernel=0.0, memory=1.0, matrix=1.0, link=0.0, network=0.0, imbalance=1.0)
MILLION = 1 << 20


def limited_by(name: str, island: int = 8, **more: float) -> Rates:
    """A device with no limit but one of a unit a second."""
    rates = {key: inf for key in ("memory", "matrix", "narrow", "link", "network")}
    return Rates(constants=PLAIN, island=island, measured=True, **{**rates, name: 1.0, **more})


def totals(work, rates, step, layout=None):
    model = CostModel(work, Arrangement(layout or Layout()), rates, 2)
    spent = model.stages(step)
    return spent[0] if len(spent) == 1 else spent


def test_one_token_of_kimi_k3_reads_137_gb_of_weights(k3_work):
    spent = totals(k3_work, limited_by("memory"), Step(1, 1, 0.0))
    assert spent.weights / 1e9 == pytest.approx(137.0, abs=0.2)


def test_many_tokens_read_all_weights_but_the_embedding(k3_work):
    spent = totals(k3_work, limited_by("memory"), Step(100_000, 100_000, 0.0))
    table = k3_work.table
    matrices = sum(table.whole_bytes(c) for c in table.classes if c.part in ("vision", "embed"))
    assert spent.weights == pytest.approx(table.total_bytes - matrices, rel=0.002)


def test_128_tokens_touch_nine_tenths_of_the_experts(k3_work):
    few = totals(k3_work, limited_by("memory"), Step(1, 1, 0.0)).weights
    many = totals(k3_work, limited_by("memory"), Step(128, 128, 0.0)).weights
    experts = 92 * 896 * 17_547_264
    assert (many - few) / experts == pytest.approx(0.90 - 16 / 896, abs=0.005)


def test_one_token_costs_the_flop_of_its_matrices(k3_work):
    spent = totals(k3_work, limited_by("matrix", narrow=1.0), Step(1, 1, 0.0))
    assert spent.weights == pytest.approx(k3_work.flops_per_token, rel=1e-9)


def test_a_million_tokens_of_past_cost_what_their_cache_holds(k3_work):
    near = totals(k3_work, limited_by("memory"), Step(1, 1, 0.0)).attention
    far = totals(k3_work, limited_by("memory"), Step(1, 1, MILLION)).attention
    assert far - near == 28_991_029_248
    assert near == 2 * 449_372_160  # recurrent state, read and written
    flops = totals(k3_work, limited_by("matrix"), Step(1, 1, MILLION)).attention
    assert flops == pytest.approx(5.26e12 + 0.76e9, rel=0.002)


def test_a_prompt_of_a_million_tokens_costs_what_its_pairs_do(k3_work):
    pairs = 0.0
    for start in range(0, MILLION, 1 << 16):
        step = Step(1 << 16, 1, start, prompt=True)
        pairs += totals(k3_work, limited_by("matrix"), step).attention
    again = 24 * 2 * 512 * 24_576 * sum(range(0, MILLION, 1 << 16))
    recurrent = 0.76e9 * MILLION
    assert pairs - again - recurrent == pytest.approx(0.81e18, rel=0.005)


def test_tensor_parallel_sums_are_three_a_layer(k3_work):
    rates = replace(limited_by("memory"), constants=replace(PLAIN, link=1.0), memory=inf)
    spent = totals(k3_work, rates, Step(1, 1, 0.0), Layout(tp=8))
    assert spent.collectives == 2 * 1 + 3 * 92 + 1  # and one for the logits


def test_stages_hand_their_carry_on(k3_work):
    stages = totals(k3_work, limited_by("link"), Step(4, 4, 0.0), Layout(pp=2))
    assert stages[0].collectives == 4 * 9 * 7168 * 2
    far = totals(k3_work, limited_by("network", island=1), Step(4, 4, 0.0), Layout(pp=2))
    assert far[0].collectives == 4 * 9 * 7168 * 2


def test_stages_share_the_layers(k3_work):
    whole = totals(k3_work, limited_by("matrix", narrow=1.0), Step(1, 1, 0.0))
    parts = totals(k3_work, limited_by("matrix", narrow=1.0), Step(1, 1, 0.0), Layout(pp=7))
    assert sum(part.weights for part in parts) == pytest.approx(whole.weights)


def test_a_group_waits_for_all_stages_and_shares_them(k3_work):
    model = CostModel(k3_work, Arrangement(Layout(pp=8)), limited_by("memory"), 2)
    alone, _ = decode_step(model, 1, 0.0)
    eight, _ = decode_step(model, 8, 0.0)
    slowest = max(one.total for one in model.stages(Step(1, 1, 0.0)))
    assert alone == pytest.approx(sum(one.total for one in model.stages(Step(1, 1, 0.0))))
    assert eight == pytest.approx(8 * slowest)


def test_images_cost_the_flop_of_their_patches(k3_work):
    load = Workload(context=65536, concurrency=1, images=2, image_tokens=1024)
    flops = encode_seconds(k3_work, limited_by("matrix"), load)
    attention = 4 * 27 * 1536 * 4096**2
    assert flops == 2 * (4096 * 2 * 396_963_840 + attention + 1024 * 2 * 46_137_344)


def test_a_sum_takes_latency_and_two_passes_of_the_link():
    rates = rates_of(parse_fleet("16xH200@8"), PLAIN, "bfloat16")
    link = 450e9 * PLAIN.link_share
    assert rates.all_reduce(1e6, 1) == 0.0
    assert rates.all_reduce(1e6, 8) == pytest.approx(2 * 7 / 8 * 1e6 / link)
    network = 50e9 * PLAIN.network_share
    both = 2 * 7 / 8 * 1e6 / link + 2 * 1 / 2 * 1e6 / 8 / network
    assert rates.all_reduce(1e6, 16) == pytest.approx(both)


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_more_bytes_or_flop_never_take_less_time(one, other):
    rates = rates_of(parse_fleet("8xB300"), EXPECTED, "bfloat16")
    small, large = sorted((one, other))
    # Shares rise by steps with size, so a little more may be faster; twice as much is not.
    assert rates.operation(2.1 * large, 0.0) >= rates.operation(small, 0.0)
    assert rates.all_reduce(large, 8) >= rates.all_reduce(small, 8)
    assert rates.all_to_all(large, 64) >= rates.all_to_all(small, 64)


def test_shares_are_those_of_the_size():
    assert [share(MEMORY_SHARE, size) for size in (0, 1e6, 9e6, 1e9)] == [0.3, 0.6, 0.6, 0.9]
    assert share(MATRIX_SHARE, 2e11) == 0.95


def test_ranks_that_share_out_the_latent_cache_read_a_part_each(k3_work):
    at = Arrangement(Layout(tp=8), 1, 8)
    spent = CostModel(k3_work, at, limited_by("memory"), 2).stages(Step(1, 1, MILLION))[0]
    near = CostModel(k3_work, at, limited_by("memory"), 2).stages(Step(1, 1, 0.0))[0]
    assert spent.attention - near.attention == 28_991_029_248 / 8


def test_the_fullest_rank_of_experts_sets_the_time(k3_work):
    """One token draws 16 experts over 16 ranks: one each on average, sqrt(2 ln 16) more at most."""
    cut, spread = (
        totals(k3_work, limited_by("memory"), Step(1, 1, 0.0), Layout(tp=16, ep=ep)).weights
        for ep in (1, 16)
    )
    experts = 92 * 16 * 17_547_264 / 16
    assert spread - cut == pytest.approx(experts * sqrt(2 * log(16)), rel=1e-6)


def test_tokens_travel_to_their_experts_and_back(k3_work):
    spent = totals(k3_work, limited_by("link"), Step(3, 3, 0.0), Layout(dp=4, ep=4))
    assert spent.collectives == 92 * 2 * 3 * 4 * 3584 * 2


def test_others_prompts_slow_each_token_down(k3_work):
    rates = rates_of(parse_fleet("16xH200@8"), EXPECTED, "bfloat16")
    at, rules = Arrangement(Layout(tp=8, pp=2)), PlanRules(chunk_tokens=1024)
    load = Workload(context=65536, concurrency=5, input_tokens=4096, output_tokens=500)
    model = CostModel(k3_work, at, rates, 2)
    step, _ = decode_step(model, 5, 4096 + 250)
    _, busy = prefill_seconds(model, 4096, 1024)
    found = speed(k3_work, at, rates, load, rules)
    assert found.tpot == pytest.approx(step + 4 * busy / 500)
    assert found.others == pytest.approx(4 * busy / 500)
    life = found.ttft + 500 * found.tpot
    assert found.tokens_per_second == pytest.approx(5 * 500 / life)


def test_chunks_of_a_prompt_follow_one_another_through_the_stages(k3_work):
    model = CostModel(k3_work, Arrangement(Layout(pp=8)), limited_by("memory"), 2)
    stages = [one.total for one in model.stages(Step(1024, 1, 1.5 * 1024, prompt=True))]
    latency, busy = prefill_seconds(model, 4096, 1024)
    assert latency == pytest.approx(sum(stages) + 3 * max(stages))
    assert busy == pytest.approx(4 * max(stages))


def test_fp32_runs_at_half_the_rate_on_a_device_that_was_not_measured():
    fleet = parse_fleet("8xH100")
    half = rates_of(fleet, EXPECTED, "float32").matrix
    assert half == rates_of(fleet, EXPECTED, "bfloat16").matrix / 2
