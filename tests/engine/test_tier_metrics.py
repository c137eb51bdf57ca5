from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import CacheManager
from firstlight.engine.tier_metrics import record_moves, record_tiers
from firstlight.metrics.series import Series
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import StepResult, TierFlow, TierReport
from firstlight.sharding.state_spec import LatentState

LIMITS = SchedulerSettings(
    max_sequences=1, max_batch_tokens=8, chunk_tokens=8, max_waiting=1, context_length=64
)


def counted(far: tuple[FarSizes, ...]) -> dict[str, float]:
    options = CacheOptions(unit_bytes=(10,), far=far)
    cache = CacheManager(
        [LatentState(8)], num_blocks=9, block_size=4, model_digest="m", options=options
    )
    series = Series()
    record_tiers(series, cache.usage(), Scheduler(LIMITS, cache).counts)
    return series.flatten()


def test_places_are_counted_in_bytes() -> None:
    found = counted((FarSizes(3, 5),))
    assert found["tier_bytes/0-latent/host/empty"] == 30
    assert found["tier_bytes/0-latent/disk/empty"] == 50
    assert found["tier_lost_total/0-latent/disk"] == found["swaps_total"] == 0


def test_without_tiers_nothing_is_told() -> None:
    assert not counted(())


def test_moves_add_up_by_way() -> None:
    series = Series()
    flows = [TierFlow("disk", True, 100, 0.5), TierFlow("disk", False, 7, 0.1)]
    for _ in range(2):
        record_moves(series, StepResult(1, [], [], [], 0.0, TierReport([], [], flows)))
    record_moves(series, StepResult(1, [], [], [], 0.0))
    found = series.flatten()
    assert found["tier_moved_bytes_total/disk/in"] == 200
    assert found["tier_move_seconds_total/disk/out"] == 0.2
