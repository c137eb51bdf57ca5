import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import LayoutError, UsageError
from firstlight.planning.arrangement import arrangements
from firstlight.planning.constants import EXPECTED
from firstlight.planning.explain import load_text, short_count, shortage, verdict
from firstlight.planning.fleets import find_fleets
from firstlight.planning.hardware import find_device, parse_fleet
from firstlight.planning.predict import speed
from firstlight.planning.rates import rates_of
from firstlight.planning.search import Question, evaluate, search
from firstlight.planning.workload import PlanRules, Targets, Workload
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import check_layout

LOAD = Workload(context=128 * 1024, concurrency=16, images=4)


def question(spec, fleet="64xS5000@8", load=LOAD, **more):
    return Question(spec, parse_fleet(fleet), load, **more)


@pytest.mark.parametrize("devices", [1, 6, 8, 64])
def test_every_arrangement_uses_all_devices_and_is_legal(k3, dense, devices):
    for spec in (k3, dense):
        found = list(arrangements(spec, devices))
        assert len(set(found)) == len(found)
        for one in found:
            assert one.devices == devices
            check_layout(spec.facts, one.layout)


def test_tensor_parallel_groups_do_not_straddle_islands(k3):
    degrees = {a.layout.tp for a in arrangements(k3, 48, island=8)}
    assert degrees == {1, 2, 4, 8, 16, 24, 48}


def test_a_dense_models_copies_are_replicas(dense):
    assert {a.layout.dp for a in arrangements(dense, 8)} == {1}
    assert {a.replicas for a in arrangements(dense, 8)} == {1, 2, 4, 8}


def test_the_plan_is_the_fastest_that_fits_and_reasons_have_numbers(k3):
    answer = search(question(k3))
    assert answer.memory.fits and answer.num_fitting > 5
    assert len(answer.lost) == 5
    for one in answer.lost:
        assert one.speed.tpot >= answer.forecast.tpot.expected
        assert " against " in one.reason and any(c.isdigit() for c in one.reason)


def test_throughput_is_ranked_by_tokens_a_second(k3):
    load = Workload(context=32 * 1024, concurrency=512)
    answer = search(question(k3, load=load, objective="throughput"))
    assert all(
        one.speed.tokens_per_second <= answer.forecast.tokens_per_second.expected
        for one in answer.lost
    )


def test_a_verdict_says_how_much_is_left_or_short_and_where(k3):
    fits = evaluate(question(k3), Layout(tp=8, pp=8))
    text = verdict(fits.memory, LOAD)
    assert text.startswith("tp 8 x pp 8 fits with ") and text.endswith("GiB left at 128K x 16")
    short = evaluate(question(k3, "8xS5000"), Layout(tp=8))
    assert short.memory is None
    assert short.lost[0].reason.startswith("short by 191 GiB on rank 0: weights 192 GiB, ")
    assert shortage(short.lost[0].memory.worst) == short.lost[0].reason


def test_when_nothing_fits_the_ways_out_are_in_numbers(k3):
    answer = search(question(k3, "8xB300"))
    assert answer.memory is None and answer.forecast is None
    assert any("lower the concurrency to 14" in way for way in answer.ways_out)
    assert any("lower the reserve from 20% to 19.6%" in way for way in answer.ways_out)
    rules = PlanRules(reserve_share=0.196)
    assert search(question(k3, "8xB300", rules=rules)).memory is not None


def test_the_cheapest_takes_no_more_devices_than_it_needs(k3):
    answer = search(question(k3, objective="cheapest"))
    assert answer.fleet.count == 32
    fewer = search(question(k3, "24xS5000"))
    assert fewer.memory is None


def test_a_target_that_is_missed_is_said_with_both_times(k3):
    answer = search(question(k3, targets=Targets(tpot=1e-4)))
    assert answer.memory is not None
    assert answer.misses.endswith("asked 0.1 ms")


def test_an_arrangement_that_cannot_be_is_refused(k3):
    with pytest.raises(LayoutError, match="tp 7 does not divide"):
        evaluate(question(k3), Layout(tp=7))
    with pytest.raises(LayoutError, match="needs 128 devices, the fleet has 64"):
        evaluate(question(k3), Layout(tp=8, pp=16))


def test_the_smallest_fleets_come_first(k3):
    devices = [find_device(name) for name in ("S5000", "GB300", "L40S")]
    found = find_fleets(question(k3, "1xS5000"), devices, limit=64)
    assert [(f.device.name, f.works, f.answer.fleet.count) for f in found] == [
        ("GB300", True, 8),
        ("S5000", True, 32),
        ("L40S", True, 64),
    ]


def test_fleets_that_fail_come_last(k3):
    devices = [find_device(name) for name in ("S5000", "GB300")]
    found = find_fleets(question(k3, "1xS5000"), devices, limit=8)
    assert [(f.device.name, f.works) for f in found] == [("GB300", True), ("S5000", False)]


def test_a_plan_that_keeps_the_targets_goes_before_a_faster_one_that_does_not(k3):
    load = Workload(context=1 << 20, concurrency=16)
    free = search(question(k3, load=load))
    sooner = min(one.speed.ttft for one in free.lost if one.speed)
    assert sooner < free.forecast.ttft.expected
    bound = search(question(k3, load=load, targets=Targets(ttft=sooner * 1.001)))
    assert not bound.misses and bound.forecast.tpot.expected > free.forecast.tpot.expected


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_more_work_never_takes_less_time(k3_work, data):
    found = [a for a in arrangements(k3_work.spec, 16) if a.layout.tp in (1, 8, 16)]
    at = data.draw(st.sampled_from(found))
    rates = rates_of(parse_fleet("16xH200@8"), EXPECTED, "bfloat16")

    def times(**asked):
        load = Workload(context=1 << 20, **{"concurrency": 4, "input_tokens": 4096, **asked})
        return speed(k3_work, at, rates, load, PlanRules())

    least = times()
    assert times(input_tokens=16384).ttft >= least.ttft
    assert times(images=4).ttft > least.ttft
    assert times(concurrency=64).tpot >= least.tpot


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_band_holds_what_is_expected(k3, data):
    answer = search(question(k3, data.draw(st.sampled_from(["32xH100", "16xB200", "64xS5000"]))))
    forecast = answer.forecast
    for band in (forecast.ttft, forecast.tpot, forecast.tokens_per_second):
        assert band.low < band.expected < band.high


def test_a_load_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="exceed the context of 100"):
        Workload(context=100, concurrency=1, input_tokens=90, output_tokens=20)
    with pytest.raises(UsageError, match="concurrency must be at least 1"):
        Workload(context=10000, concurrency=0)
    with pytest.raises(UsageError, match=r"reserve_share 1\.5"):
        PlanRules(reserve_share=1.5)


def test_counts_are_written_as_users_do():
    assert [short_count(n) for n in (1 << 20, 131072, 1000)] == ["1M", "128K", "1000"]
    assert load_text(LOAD) == "128K x 16"
