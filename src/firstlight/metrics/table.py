"""Owns the one table of metric names, kinds, units, labels and help texts.

Knows nothing of who measures them or how they are exported.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
PREFIX = "firstlight_"


class Metric(NamedTuple):
    """One family. `buckets` are upper bounds in the metric's unit, without the infinite one."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)

_ROWS: tuple[Metric, ...] = (
    # API process: every completion that entered ends in exactly one outcome
    Metric("http_answers_total", "counter", "1", "HTTP answers", ("status", "route")),
    Metric("requests_received_total", "counter", "1", "Completions asked of the engine"),
    Metric(
        "requests_total",
        "counter",
        "1",
        "Completions ended: stop, length, cancelled, refused, error",
        ("outcome",),
    ),
    Metric("requests_in_flight", "gauge", "1", "Completions asked and not ended"),
    Metric("prompt_tokens_total", "counter", "tokens", "Prompt tokens of ended completions"),
    Metric("cached_tokens_total", "counter", "tokens", "Prompt tokens found in the prefix cache"),
    Metric("generated_tokens_total", "counter", "tokens", "Tokens generated"),
    Metric("ttft_seconds", "histogram", "s", "From arrival to the first token", (), _LONG),
    Metric("tpot_seconds", "histogram", "s", "Mean time per token after the first", (), _SHORT),
    Metric("e2e_seconds", "histogram", "s", "From arrival to the last token", (), _LONG),
    Metric("heartbeat_age_seconds", "gauge", "s", "Age of the engine's newest heartbeat"),
    Metric("stalled_seconds", "gauge", "s", "Time a busy engine has made no progress"),
    Metric("ready", "gauge", "1", "1 once the start-up gate has passed and no drain has begun"),
    # engine process
    Metric("waiting_requests", "gauge", "1", "Requests waiting in the engine, preempted included"),
    Metric("running_requests", "gauge", "1", "Requests in the running batch"),
    Metric("queue_seconds", "histogram", "s", "From arrival to the first step", (), _LONG),
    Metric("steps_total", "counter", "1", "Steps finished"),
    Metric("step_seconds", "histogram", "s", "Duration of one step", (), _SHORT),
    Metric("batch_tokens", "histogram", "tokens", "Tokens computed in one step", (), _TOKENS),
    Metric("batch_requests", "histogram", "1", "Requests computed in one step", (), _TOKENS),
    Metric("cache_used_bytes", "gauge", "B", "Bytes in use of a cache pool", ("pool",)),
    Metric("cache_total_bytes", "gauge", "B", "Bytes of a cache pool", ("pool",)),
    Metric(
        "recurrent_slots", "gauge", "1", "Slots of recurrent state: live, snapshot, empty", ("use",)
    ),
    Metric("snapshot_hits_total", "counter", "1", "Recurrent snapshots resumed from"),
    Metric("snapshot_evictions_total", "counter", "1", "Recurrent snapshots given up for others"),
    Metric(
        "cache_group_bytes",
        "gauge",
        "B",
        "Bytes of a cache group on one rank: used, cached, empty",
        ("group", "use"),
    ),
    Metric("cache_stranded_bytes", "gauge", "B", "Free, but another group is full", ("group",)),
    Metric("cache_unwritten_tokens", "gauge", "tokens", "Held blocks' room without", ("group",)),
    Metric("cache_longest_free_bytes", "gauge", "B", "Free bytes that lie in a row", ("group",)),
    Metric("cache_copied_bytes_total", "counter", "B", "Copied to make room in a row", ("group",)),
    Metric("cache_asked_tokens_total", "counter", "tokens", "Reusable at most", ("group",)),
    Metric("cache_found_tokens_total", "counter", "tokens", "Of these found here", ("group",)),
    Metric("cache_reuses_total", "counter", "1", "Idle blocks or slots used again", ("group",)),
    Metric("cache_reuse_gap_seconds_total", "counter", "s", "Time they were idle", ("group",)),
    Metric("cache_evictions_total", "counter", "1", "Idle ones taken for others", ("group",)),
    Metric("cache_evicted_idle_seconds_total", "counter", "s", "Time they were idle", ("group",)),
    Metric(
        "tier_bytes",
        "gauge",
        "B",
        "Cache beyond the device on one rank: held, cached, empty",
        ("group", "place", "use"),
    ),
    Metric("tier_hits_total", "counter", "1", "Pages or slots found", ("group", "place")),
    Metric("tier_stored_total", "counter", "1", "Pages or slots written", ("group", "place")),
    Metric("tier_dropped_total", "counter", "1", "Given up for others", ("group", "place")),
    Metric("tier_lost_total", "counter", "1", "Lost: recomputed if needed", ("group", "place")),
    Metric("tier_moved_bytes_total", "counter", "B", "Moved by one rank", ("place", "direction")),
    Metric("tier_move_seconds_total", "counter", "s", "Time of that", ("place", "direction")),
    Metric("swaps_total", "counter", "1", "Preemptions that left their state beyond the device"),
    Metric("tier_fetches_total", "counter", "1", "Requests whose state was fetched"),
    Metric("prefetch_misses_total", "counter", "1", "Fetches not done within a step"),
    Metric("tier_recomputed_tokens_total", "counter", "tokens", "Computed as the quicker way"),
    Metric("prefix_lookup_tokens_total", "counter", "tokens", "Prompt tokens looked up"),
    Metric("prefix_hit_tokens_total", "counter", "tokens", "Prompt tokens found when looked up"),
    Metric("prefix_hit_ratio", "gauge", "1", "Found / looked up since the start"),
    Metric("preemptions_total", "counter", "1", "Requests put back to the queue"),
    Metric("books_checked_total", "counter", "1", "Times blocks and counters were recounted idle"),
    Metric("nan_rows_total", "counter", "1", "Rows whose logits were not finite"),
    Metric("weights_checks_total", "counter", "1", "Times all weights in memory were compared"),
    Metric("weights_damages_total", "counter", "1", "Runs of weights found to have changed"),
    Metric("weights_checked_bytes_total", "counter", "B", "Bytes compared, of one rank"),
    Metric("weights_check_seconds_total", "counter", "s", "Time the engine spent comparing"),
    Metric("weights_round_seconds", "gauge", "s", "From first to last in the last round"),
    Metric(
        "weights_streamed_bytes_total",
        "counter",
        "B",
        "Weights brought to a rank again: from file, host",
        ("rank", "source"),
    ),
    Metric("expert_lookups_total", "counter", "1", "Experts wanted: hit, miss", ("rank", "result")),
    Metric("weights_waits_total", "counter", "1", "Times a step waited for weights", ("rank",)),
    Metric("weights_wait_seconds_total", "counter", "s", "How long it waited", ("rank",)),
    Metric("startup_phase_seconds", "gauge", "s", "Duration of a start-up phase", ("phase",)),
    Metric("memory_predicted_bytes", "gauge", "B", "Planned bytes of a part", ("component",)),
    Metric("memory_actual_bytes", "gauge", "B", "Allocated bytes of a part", ("component",)),
    # every process
    Metric("process_resident_bytes", "gauge", "B", "Resident memory of a process", ("process",)),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ROWS}
