"""Owns threads that go on reading while a model computes, and the watch over who waits for them.

Knows jobs, not what they read. Jobs run in the order they were given, urgent ones first; nothing
here has a limit on total time, only on time without progress.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from firstlight.checkpoint.executor import Job, Patience, Worker, stalled
from firstlight.errors import EnvironmentProblem

_POLL_SECONDS = 0.1
_LOGGER = logging.getLogger(__name__)


class Reading:
    """Some jobs that were given together; `then` runs once on a reading thread after the last."""

    def __init__(self, jobs: Sequence[Job], then: Callable[[], None] | None) -> None:
        self.then = then
        self.left = len(jobs)
        self.error: BaseException | None = None
        self.done = False


class ReadingThreads:
    """Threads that live as long as the rank. `who` begins the words about a standstill."""

    def __init__(self, threads: int, *, patience: Patience | None = None, who: str = "") -> None:
        self._patience, self._who = patience or Patience(), who
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, Reading]] = deque()
        self._running: dict[int, Job] = {}
        self._moved_at = perf_counter()
        self._closed = False
        for number in range(threads):
            # Daemons: a thread stuck in a read of a dead device must not keep the process alive.
            threading.Thread(
                target=self._work, args=(number,), name=f"weights-{number}", daemon=True
            ).start()

    def start(
        self,
        jobs: Sequence[Job],
        then: Callable[[], None] | None = None,
        *,
        is_urgent: bool = False,
    ) -> Reading:
        """Queues jobs, at least one, urgent ones before all that wait; returns at once."""
        assert jobs, "nothing to read"
        reading = Reading(jobs, then)
        with self._changed:
            self._moved_at = perf_counter() if not self._running else self._moved_at
            queued = [(job, reading) for job in jobs]
            if is_urgent:
                self._jobs.extendleft(reversed(queued))
            else:
                self._jobs.extend(queued)
            self._changed.notify_all()
        return reading

    def wait(self, reading: Reading) -> float:
        """Returns when the reading is done: the seconds waited.

        Raises what a job raised, or EnvironmentProblem naming file and offset when nothing moves.
        """
        began, alerted = perf_counter(), False
        while not reading.done:
            with self._changed:
                if not reading.done:
                    self._changed.wait(_POLL_SECONDS)
            if not reading.done:
                alerted = self._judge(perf_counter() - max(self._moved_at, began), alerted)
        if reading.error is not None:
            raise reading.error
        return perf_counter() - began

    def close(self) -> None:
        """Lets the threads end once their present jobs have."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def _judge(self, idle: float, alerted: bool) -> bool:
        """Warns once of a standstill and raises when it lasts; returns whether it has warned."""
        if idle < self._patience.alert_seconds:
            return False
        with self._changed:
            running = sorted(self._running.values(), key=lambda job: (str(job.file), job.offset))
        text = stalled(running, idle, self._who)
        if idle >= self._patience.stall_seconds:
            raise EnvironmentProblem(text)
        if not alerted:
            _LOGGER.warning("%s", text)
        return True

    def _work(self, number: int) -> None:
        worker = Worker()
        while (taken := self._take(number)) is not None:
            job, reading = taken
            error: BaseException | None = None
            try:
                if reading.error is None:
                    job.run(worker)
            except BaseException as problem:  # this thread's edge: raised again by `wait`
                error = problem
            self._ended(number, reading, error)

    def _take(self, number: int) -> tuple[Job, Reading] | None:
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            job, reading = self._jobs.popleft()
            self._running[number] = job
            return job, reading

    def _ended(self, number: int, reading: Reading, error: BaseException | None) -> None:
        with self._changed:
            reading.error = reading.error or error
            reading.left -= 1
            last = reading.left == 0
        if last and reading.then is not None and reading.error is None:
            try:
                reading.then()
            except BaseException as problem:  # as above
                reading.error = problem
        with self._changed:
            self._running.pop(number, None)
            self._moved_at = perf_counter()
            reading.done = reading.done or last
            self._changed.notify_all()
