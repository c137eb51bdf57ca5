"""Books are recounted when nothing runs, seldom, and only after something ran."""

import pytest

from firstlight.engine.idle_check import SECONDS_BETWEEN, IdleCheck
from firstlight.metrics.series import Series
from local_engine import LocalEngine, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    folder = tmp_path_factory.mktemp("one")
    write_checkpoint(folder, tiny_config("smollm2"))
    return LocalEngine(folder)


def test_it_recounts_once_after_work_and_not_too_soon(engine: LocalEngine) -> None:
    clock, series = Clock(), Series()
    check = IdleCheck(engine.scheduler, series, clock)
    clock.now = 2 * SECONDS_BETWEEN
    assert check.turn() is None and not series.flatten(), "nothing ran"
    for _ in range(3):
        engine.run(random_prompts(20), greedy(2))
        assert check.turn() is None and check.turn() is None
        assert series.flatten() == {"books_checked_total": 1}
    clock.now += SECONDS_BETWEEN
    assert check.turn() is None
    assert series.flatten() == {"books_checked_total": 2}


def test_a_block_that_nobody_holds_is_told(engine: LocalEngine) -> None:
    clock = Clock()
    check = IdleCheck(engine.scheduler, Series(), clock)
    clock.now = 2 * SECONDS_BETWEEN
    engine.run(random_prompts(20), greedy(2))
    pool = engine.cache._groups[0]._pool  # type: ignore[attr-defined]
    leaked = pool.acquire()
    problem = check.turn()
    assert problem is not None and "books of the cache" in problem and "restart" in problem
    pool.release(leaked, keep=False)
    assert check.recount() is None
