"""Jobs run once; the first error is raised; a stalled read is named, a slow load let finish."""

import logging
import threading
import time
from pathlib import Path

import pytest

from firstlight.checkpoint.executor import Growth, Job, Patience, run_jobs
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.progress import silent
from firstlight.errors import DigestMismatch, EnvironmentProblem

QUICK = Patience(alert_seconds=0.2, stall_seconds=0.6)


def job(run, number=0, num_bytes=10):
    return Job(f"unit-{number}", Path("weights.bin"), number * num_bytes, num_bytes, run)


def run(jobs, *, threads=2, patience=QUICK, progress=silent, **more):
    return run_jobs(
        jobs, threads=threads, phase="load", progress=progress, patience=patience, **more
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_job_runs_once(threads):
    ran, lock = [], threading.Lock()

    def note(number):
        def body(worker):
            with lock:
                ran.append(number)

        return body

    run([job(note(n), n) for n in range(50)], threads=threads)
    assert sorted(ran) == list(range(50))


def test_nothing_to_do_ends_at_once():
    assert run([]).seconds == {}


def test_the_error_of_a_job_reaches_the_caller_and_stops_the_rest():
    ran = []

    def fail(worker):
        raise DigestMismatch("granule 7")

    with pytest.raises(DigestMismatch, match="granule 7"):
        run([job(fail)] + [job(lambda worker: ran.append(1), n) for n in range(9)], threads=1)
    assert ran == []


def test_a_read_that_never_returns_is_named_with_file_and_offset(tmp_path, caplog):
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(100))
    release = threading.Event()

    def hang(descriptor, buffers, offset):
        release.wait(30)
        return 0

    file = InputFile(path, read_call=hang)
    stuck = Job("layer-007", path, 64, 36, lambda worker: file.read_into(worker.staging(36), 64))
    with caplog.at_level(logging.WARNING), pytest.raises(EnvironmentProblem) as caught:
        run([stuck], who="rank 3")
    release.set()
    assert f"{path} at byte 64 (36 B, layer-007)" in str(caught.value)
    assert str(caught.value).startswith("rank 3: no byte arrived") and "storage" in str(
        caught.value
    )
    assert "no byte arrived" in caplog.text


def test_a_load_slower_than_the_patience_is_let_finish():
    """Each job takes less than the patience, all together take far more."""
    seen = []
    spent = run(
        [job(lambda worker: time.sleep(0.15), n) for n in range(8)],
        threads=1,
        progress=lambda phase, done, total, unit: seen.append((done, total)),
    )
    assert seen[-1] == (80, 80)
    assert spent.seconds == {} and spent.threads == 1


def threads_in_the_end(rate_of, most=16):
    """Lets a load run for a minute at the rate that so many threads reach."""
    growth, threads, done = Growth(most), 2, 0.0
    for tick in range(600):
        threads += growth.wants_more(threads, int(done), tick / 10)
        done += rate_of(threads) / 10
    return threads


def test_threads_are_added_while_bytes_arrive_faster():
    assert threads_in_the_end(lambda threads: 1e8 * threads) == 16
    assert threads_in_the_end(lambda threads: 1e8 * min(threads, 6)) in (6, 7)
    assert threads_in_the_end(lambda threads: 1e9) == 3
    assert threads_in_the_end(lambda threads: 0.0) == 2
    assert threads_in_the_end(lambda threads: 1e8 * threads, most=0) == 2


def test_more_threads_run_every_job_once():
    ran, lock = [], threading.Lock()

    def note(number):
        def body(worker):
            time.sleep(0.05)
            with lock:
                ran.append(number)

        return body

    run([job(note(n), n) for n in range(40)], threads=1, most_threads=4)
    assert sorted(ran) == list(range(40))
