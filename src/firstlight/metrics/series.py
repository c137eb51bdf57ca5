"""Owns the running numbers: folds events into series and flattens them to `name -> number`.

Knows nothing of processes or export. A flat key is `name` or `name/label value/...`, labels in
the table's order; a histogram gives `name.bucket/bound` (cumulative), `name.sum` and `name.count`.
"""

import resource
from bisect import bisect_left
from functools import singledispatchmethod

from firstlight.metrics import events
from firstlight.metrics.events import Event
from firstlight.metrics.table import METRICS, Metric


class Histogram:
    """Counts observations by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Takes one observation, in the metric's unit."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def flatten(self, name: str) -> dict[str, float]:
        """Gives cumulative buckets, the sum and the count."""
        flat: dict[str, float] = {}
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            flat[f"{name}.bucket/{bound}"] = float(seen)
        return flat | {f"{name}.sum": self.total, f"{name}.count": float(seen)}


class Series:
    """A Recorder that keeps the numbers of one process: one thread writes, any may read."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._histograms = {
            metric.name: Histogram(metric.buckets)
            for metric in METRICS.values()
            if metric.kind == "histogram"
        }

    def record(self, event: Event) -> None:
        """Folds an event into the series."""
        self._fold(event)

    def flatten(self) -> dict[str, float]:
        """Gives every number recorded so far; histograms without observations are left out."""
        flat = dict(self._values)
        for name, histogram in self._histograms.items():
            if any(histogram.counts):
                flat |= histogram.flatten(name)
        return flat

    def _add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        key = flat_key(METRICS[name], labels)
        self._values[key] = self._values.get(key, 0.0) + amount

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[flat_key(METRICS[name], labels)] = float(value)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    @singledispatchmethod
    def _fold(self, event: object) -> None:
        raise AssertionError(f"{type(event).__name__} has no fold in Series")

    @_fold.register
    def _(self, event: events.HttpAnswered) -> None:
        self._add("http_answers_total", 1.0, str(event.status), event.route)

    @_fold.register
    def _(self, event: events.CompletionReceived) -> None:
        self._add("requests_received_total")
        self._add("requests_in_flight")

    @_fold.register
    def _(self, event: events.FirstToken) -> None:
        self._observe("ttft_seconds", event.seconds)

    @_fold.register
    def _(self, event: events.CompletionEnded) -> None:
        self._add("requests_in_flight", -1.0)
        self._add("requests_total", 1.0, event.outcome)
        self._add("prompt_tokens_total", event.num_prompt)
        self._add("cached_tokens_total", event.num_cached)
        self._add("generated_tokens_total", event.num_generated)
        if event.outcome in ("stop", "length"):
            self._observe("e2e_seconds", event.seconds)
            if event.num_generated > 1:
                self._observe("tpot_seconds", event.decode_seconds / (event.num_generated - 1))

    @_fold.register
    def _(self, event: events.EngineSeen) -> None:
        self._set("heartbeat_age_seconds", event.heartbeat_age_seconds)
        self._set("stalled_seconds", event.stalled_seconds)
        self._set("ready", event.ready)

    @_fold.register
    def _(self, event: events.RequestStarted) -> None:
        self._observe("queue_seconds", event.queue_seconds)

    @_fold.register
    def _(self, event: events.StepDone) -> None:
        self._add("steps_total")
        self._observe("step_seconds", event.seconds)
        self._observe("batch_tokens", event.num_tokens)
        self._observe("batch_requests", event.num_requests)

    @_fold.register
    def _(self, event: events.QueueState) -> None:
        self._set("waiting_requests", event.num_waiting)
        self._set("running_requests", event.num_running)

    @_fold.register
    def _(self, event: events.CacheState) -> None:
        self._set("cache_used_bytes", event.used_bytes, event.pool)
        self._set("cache_total_bytes", event.total_bytes, event.pool)

    @_fold.register
    def _(self, event: events.SlotState) -> None:
        self._set("recurrent_slots", event.num_live, "live")
        self._set("recurrent_slots", event.num_snapshots, "snapshot")
        self._set("recurrent_slots", event.num_empty, "empty")
        self._set("snapshot_hits_total", event.num_hits)
        self._set("snapshot_evictions_total", event.num_evictions)

    @_fold.register
    def _(self, event: events.CacheGroupState) -> None:
        assert 0 <= event.found_tokens <= event.asked_tokens, "more tokens found than asked for"
        self._set("cache_group_bytes", event.used_bytes, event.group, "used")
        self._set("cache_group_bytes", event.cached_bytes, event.group, "cached")
        self._set("cache_group_bytes", event.empty_bytes, event.group, "empty")
        self._set("cache_stranded_bytes", event.stranded_bytes, event.group)
        self._set("cache_unwritten_tokens", event.unwritten_tokens, event.group)
        self._set("cache_longest_free_bytes", event.longest_run_bytes, event.group)
        self._set("cache_copied_bytes_total", event.copied_bytes, event.group)
        self._set("cache_asked_tokens_total", event.asked_tokens, event.group)
        self._set("cache_found_tokens_total", event.found_tokens, event.group)
        self._set("cache_reuses_total", event.num_reused, event.group)
        self._set("cache_reuse_gap_seconds_total", event.reused_seconds, event.group)
        self._set("cache_evictions_total", event.num_evicted, event.group)
        self._set("cache_evicted_idle_seconds_total", event.evicted_seconds, event.group)

    @_fold.register
    def _(self, event: events.TierState) -> None:
        where = (event.group, event.place)
        self._set("tier_bytes", event.held_bytes, *where, "held")
        self._set("tier_bytes", event.cached_bytes, *where, "cached")
        self._set("tier_bytes", event.empty_bytes, *where, "empty")
        self._set("tier_hits_total", event.num_hits, *where)
        self._set("tier_stored_total", event.num_stored, *where)
        self._set("tier_dropped_total", event.num_dropped, *where)
        self._set("tier_lost_total", event.num_lost, *where)

    @_fold.register
    def _(self, event: events.TierMoved) -> None:
        way = (event.place, "in" if event.inward else "out")
        self._add("tier_moved_bytes_total", event.num_bytes, *way)
        self._add("tier_move_seconds_total", event.seconds, *way)

    @_fold.register
    def _(self, event: events.SwapState) -> None:
        self._set("swaps_total", event.num_swaps)
        self._set("tier_fetches_total", event.num_fetches)
        self._set("prefetch_misses_total", event.num_late)
        self._set("tier_recomputed_tokens_total", event.recomputed_tokens)

    @_fold.register
    def _(self, event: events.PrefixLookup) -> None:
        assert 0 <= event.num_hit <= event.num_tokens, "more prefix tokens found than looked up"
        self._add("prefix_lookup_tokens_total", event.num_tokens)
        self._add("prefix_hit_tokens_total", event.num_hit)
        looked_up = self._values["prefix_lookup_tokens_total"]
        found = self._values["prefix_hit_tokens_total"]
        self._set("prefix_hit_ratio", found / looked_up if looked_up else 0.0)

    @_fold.register
    def _(self, event: events.Preempted) -> None:
        self._add("preemptions_total")

    @_fold.register
    def _(self, event: events.BooksChecked) -> None:
        self._add("books_checked_total")

    @_fold.register
    def _(self, event: events.NanRows) -> None:
        self._add("nan_rows_total", event.num_rows)

    @_fold.register
    def _(self, event: events.WeightsStreamed) -> None:
        rank = str(event.rank)
        self._add("weights_streamed_bytes_total", event.file_bytes, rank, "file")
        self._add("weights_streamed_bytes_total", event.host_bytes, rank, "host")
        self._add("expert_lookups_total", event.expert_hits, rank, "hit")
        self._add("expert_lookups_total", event.expert_misses, rank, "miss")
        self._add("weights_waits_total", event.waits, rank)
        self._add("weights_wait_seconds_total", event.wait_seconds, rank)

    @_fold.register
    def _(self, event: events.PhaseDone) -> None:
        self._set("startup_phase_seconds", event.seconds, event.phase)

    @_fold.register
    def _(self, event: events.MemoryMeasured) -> None:
        self._set("memory_predicted_bytes", event.predicted_bytes, event.component)
        self._set("memory_actual_bytes", event.actual_bytes, event.component)

    @_fold.register
    def _(self, event: events.WeightsRead) -> None:
        self._add("weights_checked_bytes_total", event.num_bytes)
        self._add("weights_check_seconds_total", event.seconds)
        self._add("weights_damages_total", event.damages)

    @_fold.register
    def _(self, event: events.WeightsRound) -> None:
        self._add("weights_checks_total")
        self._set("weights_round_seconds", event.seconds)

    @_fold.register
    def _(self, event: events.ProcessMemory) -> None:
        self._set("process_resident_bytes", event.resident_bytes, event.process)


def flat_key(metric: Metric, labels: tuple[str, ...]) -> str:
    """Writes the flat key of a counter or gauge; only the last label value may hold a slash."""
    assert not any("/" in value for value in labels[:-1]), f"{metric.name}: {labels}"
    assert len(labels) == len(metric.labels), f"{metric.name} takes the labels {metric.labels}"
    return "/".join((metric.name, *labels))


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
