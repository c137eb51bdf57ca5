"""Owns the threads that read weights and the watch over their progress; knows nothing of tensors.

There is no limit on total time: a slow load is never killed. What is watched is lack of progress.
More threads are started while that makes bytes arrive faster: so deep a queue, no deeper.
"""

import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from firstlight.checkpoint.progress import Progress
from firstlight.errors import EnvironmentProblem
from firstlight.units import format_bytes, format_count, format_seconds

_POLL_SECONDS = 0.1
_TUNE_SECONDS = 0.4
_HUGE_PAGE = 2 * 2**20
_WORTHWHILE = 0.5  # the share of its part that a thread more must bring, or no other follows
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
        self._pages: mmap.mmap | bytearray = bytearray()
        self.seconds: dict[str, float] = {}

    def staging(self, num_bytes: int) -> memoryview:
        """Returns `num_bytes` of memory, valid until the next call."""
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]

    def pages(self, num_bytes: int) -> memoryview:
        """Returns `num_bytes` of memory that begin at a page, valid until the next call.

        The pages are huge where the system has them: a device then takes a read in few pieces, and
        reads past the page cache are up to twice as fast.
        """
        if len(self._pages) < num_bytes:
            self._pages = _huge_pages(num_bytes)
        return memoryview(self._pages)[:num_bytes]

    def spend(self, activity: str, started: float) -> float:
        """Counts the time since `started` for an activity and returns the time now."""
        now = perf_counter()
        self.seconds[activity] = self.seconds.get(activity, 0.0) + now - started
        return now


def _huge_pages(num_bytes: int) -> mmap.mmap:
    """Returns memory of no file and no other process, in huge pages if it can be."""
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


@dataclass(frozen=True)
class Job:
    """One read and what follows from it; `file` and `offset` are named when it hangs."""

    unit: str
    file: Path
    offset: int
    num_bytes: int
    run: Callable[[Worker], None]


@dataclass(frozen=True)
class RunReport:
    """The seconds of all threads by activity, and how many threads there were in the end."""

    seconds: dict[str, float]
    threads: int


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
    workers: list[Worker] = field(default_factory=list)

    def start_worker(self) -> None:
        """Starts one more thread on the jobs."""
        with self.changed:
            worker, number = Worker(), len(self.workers)
            self.workers.append(worker)
            self.alive += 1
        # Daemons: a thread stuck in a read of a dead device must not keep the process alive.
        threading.Thread(
            target=_work, args=(self, number, worker), name=f"load-{number}", daemon=True
        ).start()


class Growth:
    """Decides, from the rate of the last interval, whether one more thread is worth a try."""

    def __init__(self, most: int) -> None:
        self._most, self._best, self._failed = most, 0.0, 0
        self._since: float | None = None
        self._bytes = 0

    def wants_more(self, threads: int, done: int, now: float) -> bool:
        """Says whether to start one more thread, given the bytes done by `now` (seconds)."""
        if self._since is None:
            self._since = now
        elapsed = now - self._since
        if threads >= self._most or self._failed > 1 or elapsed < _TUNE_SECONDS:
            return False
        rate = (done - self._bytes) / elapsed
        self._since, self._bytes = now, done
        if rate <= self._best * (1 + _WORTHWHILE / threads):
            self._failed += 1
            return False
        self._best, self._failed = rate, 0
        return True


def run_jobs(
    jobs: Sequence[Job],
    *,
    threads: int,
    phase: str,
    progress: Progress,
    patience: Patience,
    most_threads: int = 0,
    who: str = "",
) -> RunReport:
    """Runs every job once, in order of start. Up to `most_threads` are tried where more than
    `threads` help.

    Raises the first error of a job, or EnvironmentProblem naming `who`, file and offset when no job
    ended for `patience.stall_seconds`.
    """
    shared = _Shared(iter(jobs))
    for _ in range(max(1, min(threads, len(jobs)))):
        shared.start_worker()
    watch = _Watch(sum(job.num_bytes for job in jobs), phase, progress, patience, who)
    watch.until_done(shared, Growth(min(most_threads, len(jobs))))
    seconds: dict[str, float] = {}
    for worker in shared.workers:
        for activity, spent in worker.seconds.items():
            seconds[activity] = seconds.get(activity, 0.0) + spent
    return RunReport(seconds, len(shared.workers))


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


@dataclass(frozen=True)
class _Watch:
    """Reports progress, and gives up when there is none."""

    total: int
    phase: str
    progress: Progress
    patience: Patience
    who: str

    def until_done(self, shared: _Shared, growth: Growth) -> None:
        """Returns when all threads have ended; raises what a job raised, or a standstill."""
        last_bytes, last_change, alerted = -1, perf_counter(), False
        while True:
            with shared.changed:
                if shared.alive:
                    shared.changed.wait(_POLL_SECONDS)
                done, unit, alive = shared.done_bytes, shared.unit, shared.alive
                error = shared.error
            if error is not None and not alive:
                raise error
            if done != last_bytes:
                last_bytes, last_change, alerted = done, perf_counter(), False
                self.progress(self.phase, done, self.total, unit)
            if not alive:
                return
            if error is None and growth.wants_more(alive, done, perf_counter()):
                shared.start_worker()
            alerted = self._judge(shared, perf_counter() - last_change, alerted)

    def _judge(self, shared: _Shared, idle: float, alerted: bool) -> bool:
        """Warns once of a standstill and raises when it lasts; returns whether it has warned."""
        if idle < self.patience.alert_seconds:
            return alerted
        with shared.changed:
            running = sorted(shared.running.values(), key=lambda job: (str(job.file), job.offset))
            text = stalled(running, idle, self.who)
            if idle >= self.patience.stall_seconds:
                shared.error = shared.error or EnvironmentProblem(text)
                raise shared.error
        if not alerted:
            _LOGGER.warning("%s", text)
        return True


def stalled(running: Sequence[Job], idle: float, who: str) -> str:
    """Says what is waited for, for how many seconds already, and by whom."""
    reads = "; ".join(
        f"{job.file} at byte {format_count(job.offset)} ({format_bytes(job.num_bytes)}, {job.unit})"
        for job in running
    )
    prefix = f"{who}: " if who else ""
    return (
        f"{prefix}no byte arrived for {format_seconds(idle)}; waiting for {reads}. "
        "Check that the storage answers"
    )
