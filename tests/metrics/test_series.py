"""Tests of firstlight.metrics: events fold into numbers that read back from the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from firstlight.metrics import events
from firstlight.metrics.exposition import Exposition
from firstlight.metrics.series import Series, resident_bytes
from firstlight.metrics.table import METRICS, PREFIX


def scrape(*series: Series) -> dict[tuple[str, tuple[str, ...]], float]:
    text = Exposition(lambda: [one.flatten() for one in series]).render().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


EXAMPLES: tuple[events.Event, ...] = (
    events.HttpAnswered("/v1/models", 200),
    events.CompletionReceived(),
    events.FirstToken(0.5),
    events.CompletionEnded(
        outcome="stop", num_prompt=7, num_cached=3, num_generated=5, seconds=2, decode_seconds=1
    ),
    events.EngineSeen(0.1, 0.0, True),
    events.RequestStarted(0.01),
    events.StepDone(0.02, 32, 4),
    events.QueueState(2, 3),
    events.CacheState("kv/host", 10, 40),
    events.SlotState(num_live=3, num_snapshots=2, num_empty=1, num_hits=5, num_evictions=4),
    events.CacheGroupState(
        group="0-latent",
        used_bytes=3,
        cached_bytes=2,
        empty_bytes=5,
        stranded_bytes=0,
        unwritten_tokens=7,
        longest_run_bytes=4,
        copied_bytes=6,
        asked_tokens=9,
        found_tokens=4,
        num_reused=1,
        reused_seconds=0.5,
        num_evicted=2,
        evicted_seconds=3.5,
    ),
    events.TierState(
        group="0-latent",
        place="host",
        held_bytes=3,
        cached_bytes=2,
        empty_bytes=5,
        num_hits=1,
        num_stored=4,
        num_dropped=2,
        num_lost=1,
    ),
    events.TierMoved("disk", inward=True, num_bytes=4096, seconds=0.1),
    events.SwapState(num_swaps=2, num_fetches=3, num_late=1, recomputed_tokens=64),
    events.PrefixLookup(10, 4),
    events.Preempted(),
    events.BooksChecked(),
    events.NanRows(2),
    events.WeightsStreamed(
        rank=0,
        file_bytes=4096,
        host_bytes=512,
        expert_hits=3,
        expert_misses=1,
        waits=2,
        wait_seconds=0.01,
    ),
    events.PhaseDone("load weights", 1.5),
    events.MemoryMeasured("weights", 100, 101),
    events.WeightsRead(num_bytes=4096, seconds=0.1, damages=1),
    events.WeightsRound(seconds=600.0),
    events.ProcessMemory("api", 5),
)


def test_every_metric_of_the_table_is_fed_by_some_event_and_none_else_is_exposed() -> None:
    series = Series()
    for event in EXAMPLES:
        series.record(event)
    text = Exposition(lambda: [series.flatten()]).render().decode()
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert exposed == {PREFIX + name for name in METRICS}


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in EXAMPLES} == set(events.Event.__args__)


def test_counts_of_completions_add_up() -> None:
    series = Series()
    for _ in range(5):
        series.record(events.CompletionReceived())
    for outcome in ("stop", "length", "cancelled"):
        series.record(
            events.CompletionEnded(
                outcome=outcome,
                num_prompt=2,
                num_cached=1,
                num_generated=3,
                seconds=1,
                decode_seconds=1,
            )
        )
    flat = series.flatten()
    ended = sum(value for key, value in flat.items() if key.startswith("requests_total/"))
    assert flat["requests_received_total"] == ended + flat["requests_in_flight"] == 5
    assert flat["generated_tokens_total"] == 9
    assert flat["e2e_seconds.count"] == 2  # a cancelled one has no meaningful duration


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_histogram_buckets_hold_every_observation(values: list[float]) -> None:
    series = Series()
    for value in values:
        series.record(events.FirstToken(value))
    seen = scrape(series)
    name = PREFIX + "ttft_seconds"
    assert seen[name + "_count", ()] == len(values)
    assert seen[name + "_sum", ()] == pytest.approx(sum(values))
    for bound in METRICS["ttft_seconds"].buckets:
        assert seen[name + "_bucket", (str(bound),)] == sum(value <= bound for value in values)


def test_hit_ratio_is_found_over_looked_up_and_never_above_one() -> None:
    series = Series()
    series.record(events.PrefixLookup(100, 25))
    series.record(events.PrefixLookup(100, 100))
    assert series.flatten()["prefix_hit_ratio"] == 0.625
    with pytest.raises(AssertionError, match="more prefix tokens found"):
        series.record(events.PrefixLookup(1, 2))


def test_two_processes_show_in_one_scrape() -> None:
    api, engine = Series(), Series()
    api.record(events.ProcessMemory("api", 1))
    engine.record(events.ProcessMemory("engine", 2))
    engine.record(events.CacheState("kv/host", 3, 4))
    seen = scrape(api, engine)
    assert seen[PREFIX + "process_resident_bytes", ("api",)] == 1
    assert seen[PREFIX + "process_resident_bytes", ("engine",)] == 2
    assert seen[PREFIX + "cache_used_bytes", ("kv/host",)] == 3


def test_names_carry_their_unit() -> None:
    for metric in METRICS.values():
        suffix = {"s": "_seconds", "B": "_bytes"}.get(metric.unit, "")
        total = "_total" if metric.kind == "counter" else ""
        assert metric.name.endswith(suffix + total), metric
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric


def test_resident_memory_of_this_process_is_plausible() -> None:
    assert 5 << 20 < resident_bytes() < 1 << 40
