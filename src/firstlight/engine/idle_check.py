"""Owns when the books of scheduler and cache are recounted: in idle moments, and seldom.

Knows neither what they count nor what becomes of a service whose books are wrong.
"""

import time
from collections.abc import Callable

from firstlight.metrics.events import BooksChecked, Recorder
from firstlight.schedule.scheduler import Scheduler

# Recounting takes time for every block, and a request may arrive meanwhile: it is done at most so
# often, and never for more than a hundredth of the time.
SECONDS_BETWEEN = 10.0
MOST_SHARE = 0.01


class IdleCheck:
    """Recounts after something has run. `clock` gives seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._recorder, self._clock = scheduler, recorder, clock
        self._seen = scheduler.counts.received
        self._due = clock() + SECONDS_BETWEEN

    def turn(self) -> str | None:
        """Recounts if it is time and a request came since the last time; nothing may run. Returns
        what does not add up.
        """
        received, began = self._scheduler.counts.received, self._clock()
        if received == self._seen or began < self._due:
            return None
        problem = self.recount()
        self._seen = received
        self._due = began + max(SECONDS_BETWEEN, (self._clock() - began) / MOST_SHARE)
        return problem

    def recount(self) -> str | None:
        """Recounts now."""
        try:
            self._scheduler.check_integrity()
        except AssertionError as error:
            return (
                f"the books of the cache do not add up: {error}. Answers may be wrong now: "
                "restart the service, and report this as a bug"
            )
        self._recorder.record(BooksChecked())
        return None
