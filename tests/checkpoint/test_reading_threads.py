"""Reading while others compute: in order, errors where one waits, and a standstill by name."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.checkpoint.executor import Job, Patience, Worker
from firstlight.checkpoint.reading_threads import ReadingThreads
from firstlight.errors import EnvironmentProblem, TensorError

QUICK = Patience(alert_seconds=0.05, stall_seconds=1.5)


@pytest.fixture
def threads() -> Iterator[ReadingThreads]:
    made = ReadingThreads(2, patience=QUICK, who="rank 3")
    yield made
    made.close()


def job(run: object, offset: int = 0) -> Job:
    return Job("layer-001", Path("/disk/layer-001.bin"), offset, 4096, run)  # type: ignore[arg-type]


def test_what_follows_comes_after_the_last_job_and_before_the_wait_ends(
    threads: ReadingThreads,
) -> None:
    seen: list[object] = []
    for round_number in range(20):
        jobs = [job(lambda _worker, n=n: seen.append(n)) for n in range(5)]
        threads.wait(threads.start(jobs, lambda: seen.append("then")))
        assert sorted(seen[:5], key=str) == [0, 1, 2, 3, 4] and seen[5:] == ["then"], round_number
        seen.clear()


def test_an_error_reaches_the_one_who_waits_and_nobody_else(threads: ReadingThreads) -> None:
    def fail(_worker: Worker) -> None:
        raise TensorError("/disk/layer-001.bin: the file ends early")

    good, bad = threads.start([job(lambda _w: None)]), threads.start([job(fail)])
    threads.wait(good)
    with pytest.raises(TensorError, match="ends early"):
        threads.wait(bad)
    threads.wait(threads.start([job(lambda _w: None)]))


def test_urgent_jobs_go_before_those_that_wait() -> None:
    threads, gate, seen = ReadingThreads(1), threading.Event(), []
    threads.start([job(lambda _w: gate.wait(20))])
    later = threads.start([job(lambda _w, n=n: seen.append(n)) for n in (3, 4)])
    threads.start([job(lambda _w, n=n: seen.append(n)) for n in (1, 2)], is_urgent=True)
    gate.set()
    threads.wait(later)
    assert seen == [1, 2, 3, 4]
    threads.close()


def test_a_standstill_is_told_and_then_ends_the_wait(
    threads: ReadingThreads, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    stuck = threads.start([job(lambda _w: gate.wait(20), offset=8192)])
    words = "rank 3: no byte arrived .*/disk/layer-001.bin at byte 8,192"
    with pytest.raises(EnvironmentProblem, match=words):
        threads.wait(stuck)
    assert "layer-001.bin" in caplog.text
    gate.set()
    threads.wait(threads.start([job(lambda _w: None)]))
