"""Owns the threads that read weights and the watch over their progress; knows nothing of tensors.

There is no limit on total time: a slow load is never killed. What is watched is lack of progress.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from firstlight.checkpoint.progress import Progress
from firstlight.errors import EnvironmentProblem
from firstlight.units import format_bytes, format_count, format_seconds

_POLL_SECONDS = 0.1
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long no byte may arrive before a warning is logged, and before the load is given up."""

    alert_seconds: float = 30.0
    stall_seconds: float = 300.0


class Worker:
    """What one thread keeps between jobs: a staging buffer and the seconds spent by activity."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.seconds: dict[str, float] = {}

    def staging(self, num_bytes: int) -> memoryview:
        """Returns `num_bytes` of memory, valid until the next call."""
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]

    def spend(self, activity: str, started: float) -> float:
        """Counts the time since `started` for an activity and returns the time now."""
        now = perf_counter()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - started
        return now


@dataclass(frozen=True)
class Job:
    """One read and what follows from it; `file` and `offset` are named when it hangs."""

    unit: str
    file: Path
    offset: int
    num_bytes: int
    run: Callable[[Worker], None]


@dataclass
class _Shared:
    """State of one run, changed under `changed` only."""

    jobs: Iterator[Job]
    changed: threading.Condition = field(default_factory=threading.Condition)
    done_bytes: int = 0
    unit: str = ""
    running: dict[int, Job] = field(default_factory=dict)
    error: BaseException | None = None
    alive: int = 0


def run_jobs(
    jobs: Sequence[Job],
    *,
    threads: int,
    phase: str,
    progress: Progress,
    patience: Patience,
) -> dict[str, float]:
    """Runs every job once, in order of start, and returns the seconds by activity of all threads.

    Raises the first error of a job, or EnvironmentProblem naming file and offset when no job ended
    for `patience.stall_seconds`.
    """
    total = sum(job.num_bytes for job in jobs)
    shared = _Shared(iter(jobs))
    workers = [Worker() for _ in range(max(1, min(threads, len(jobs))))]
    shared.alive = len(workers)
    for number, worker in enumerate(workers):
        # Daemons: a thread stuck in a read of a dead device must not keep the process alive.
        threading.Thread(
            target=_work, args=(shared, number, worker), name=f"load-{number}", daemon=True
        ).start()
    _watch(shared, total, phase, progress, patience)
    seconds: dict[str, float] = {}
    for worker in workers:
        for activity, spent in worker.seconds.items():
            seconds[activity] = seconds.get(activity, 0.0) + spent
    return seconds


def _work(shared: _Shared, number: int, worker: Worker) -> None:
    try:
        while (job := _take(shared, number)) is not None:
            job.run(worker)
            with shared.changed:
                shared.done_bytes += job.num_bytes
                shared.unit = job.unit
    except BaseException as error:  # the process edge of this thread: raised again by run_jobs
        with shared.changed:
            shared.error = shared.error or error
    finally:
        with shared.changed:
            shared.alive -= 1
            shared.running.pop(number, None)
            shared.changed.notify_all()


def _take(shared: _Shared, number: int) -> Job | None:
    with shared.changed:
        job = None if shared.error else next(shared.jobs, None)
        if job is not None:
            shared.running[number] = job
        return job


def _watch(shared: _Shared, total: int, phase: str, progress: Progress, patience: Patience) -> None:
    last_bytes, last_change, alerted = -1, perf_counter(), False
    while True:
        with shared.changed:
            if shared.alive:
                shared.changed.wait(_POLL_SECONDS)
            done, unit, alive = shared.done_bytes, shared.unit, shared.alive
            running = sorted(shared.running.values(), key=lambda job: (str(job.file), job.offset))
            error = shared.error
        if error is not None and not alive:
            raise error
        now = perf_counter()
        if done != last_bytes:
            last_bytes, last_change, alerted = done, now, False
            progress(phase, done, total, unit)
        if not alive:
            return
        idle = now - last_change
        if idle >= patience.stall_seconds:
            with shared.changed:
                shared.error = shared.error or EnvironmentProblem(_stalled(running, idle))
                raise shared.error
        if idle >= patience.alert_seconds and not alerted:
            alerted = True
            _LOGGER.warning("%s", _stalled(running, idle))


def _stalled(running: Sequence[Job], idle: float) -> str:
    reads = "; ".join(
        f"{job.file} at byte {format_count(job.offset)} ({format_bytes(job.num_bytes)}, {job.unit})"
        for job in running
    )
    return f"no byte arrived for {format_seconds(idle)}; waiting for {reads}. Check that storage"
