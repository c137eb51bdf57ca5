"""Holds the arithmetic of load runs and the prompts they send."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.accept.bench import BenchReport
from firstlight.accept.bench_load import ClientLoad, Dialect
from firstlight.accept.bench_numbers import RequestRecord, percentile, summarize
from firstlight.accept.bench_prompts import PromptBuilder, draw_lengths
from firstlight.accept.bench_settings import BenchSettings, Objectives
from firstlight.accept.client import Endpoint

PLAIN = BenchSettings(Endpoint("http://x"), input_tokens=40)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_statistics_module(values: list[float]) -> None:
    wanted = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 90) == pytest.approx(wanted[89], rel=1e-9, abs=1e-6)
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


def record(index: int, *chunks: float, failure: str = "", tokens: int = 0) -> RequestRecord:
    return RequestRecord(
        index=index,
        due=float(index),
        sent=float(index),
        ended=(chunks[-1] if chunks else index) + 0.5,
        chunks=chunks,
        prompt_tokens=10,
        output_tokens=tokens or len(chunks),
        failure=failure,
    )


def test_latencies_and_rates_by_hand() -> None:
    records = [record(0, 1.0, 2.0, 4.0, tokens=7), record(1, 1.5), record(2, failure="http 500")]
    numbers = summarize(records, Objectives(ttft_seconds=0.6))
    assert numbers.wall_seconds == 4.5
    assert numbers.ttft and numbers.ttft.p50 == 0.75
    assert numbers.tpot and numbers.tpot.mean == 3.0 / 6
    assert numbers.icl and (numbers.icl.count, numbers.icl.maximum) == (2, 2.0)
    assert numbers.output_tokens_per_second == 8 / 4.5
    assert numbers.total_tokens_per_second == 28 / 4.5
    assert numbers.goodput_share == 1 / 3
    assert numbers.failures == {"http 500": 1}


def test_a_run_in_which_everything_failed_has_no_latencies() -> None:
    numbers = summarize([record(0, failure="timeout")], Objectives())
    assert (numbers.ttft, numbers.e2e, numbers.num_succeeded) == (None, None, 0)


@pytest.mark.parametrize(
    ("lag", "share", "limited"), [(0.001, 0.2, False), (0.2, 0.2, True), (0.001, 0.97, True)]
)
def test_a_busy_client_is_noticed(lag: float, share: float, limited: bool) -> None:
    records = (record(0, 0.1, 0.2, 0.3),)
    numbers = summarize(records, Objectives())
    load = ClientLoad(lag, lag, share)
    bench = BenchReport(PLAIN, "m", Dialect(True, True, True), numbers, load, records)
    assert bench.client_was_bottleneck is limited


@pytest.mark.parametrize("kind", ["random", "text"])
def test_prompts_repeat_by_salt_and_share_only_what_was_asked(kind: str) -> None:
    settings = BenchSettings(Endpoint("http://x"), prompts=kind, input_tokens=40, shared_prefix=0.5)  # type: ignore[arg-type]
    builder = PromptBuilder(settings)
    first, other = builder.build(5, "a"), builder.build(5, "b")
    assert builder.build(5, "a") == first
    everything = [prompt.token_ids or prompt.text for prompt in first + other]
    half = 20 if kind == "random" else 80
    assert len(set(everything)) == 10 and len({one[:half] for one in everything}) == 1


def test_lengths_have_the_mean_asked_for() -> None:
    settings = BenchSettings(Endpoint("http://x"), input_tokens=400, input_spread=0.5)
    lengths = draw_lengths(settings, 4000, "s")
    assert statistics.mean(lengths) == pytest.approx(400, rel=0.05)
    assert min(lengths) >= 1 and statistics.stdev(lengths) > 100
