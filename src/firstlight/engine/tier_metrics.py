"""Owns what is recorded of state beyond the device; takes no decision."""

from firstlight.cache.cache_group import CacheUsage
from firstlight.metrics.events import Recorder, SwapState, TierMoved, TierState
from firstlight.schedule.step import StepResult
from firstlight.schedule.tally import SchedulerCounts


def record_tiers(recorder: Recorder, usage: CacheUsage, counts: SchedulerCounts) -> None:
    """Records how full every place is, and what was swapped and fetched; nothing without tiers."""
    for index, group in enumerate(usage.groups):
        for place in group.far:
            recorder.record(
                TierState(
                    group=f"{index}-{group.kind}",
                    place=place.place,
                    held_bytes=place.held * group.unit_bytes,
                    cached_bytes=place.cached * group.unit_bytes,
                    empty_bytes=place.empty * group.unit_bytes,
                    num_hits=place.hits,
                    num_stored=place.stored,
                    num_dropped=place.dropped,
                    num_lost=place.lost,
                )
            )
    if any(group.far for group in usage.groups):
        recorder.record(
            SwapState(
                num_swaps=counts.swaps,
                num_fetches=counts.fetches,
                num_late=counts.late_fetches,
                recomputed_tokens=counts.recomputed_tokens,
            )
        )


def record_moves(recorder: Recorder, result: StepResult) -> None:
    """Records what a step moved."""
    for flow in result.tiers.flows if result.tiers is not None else ():
        recorder.record(TierMoved(flow.place, flow.inward, flow.num_bytes, flow.seconds))
