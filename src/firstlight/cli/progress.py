"""Owns how long work is shown on stderr: a bar with rate and time left, or plain lines in a log.

Knows only phases and byte counts; the work itself calls back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from firstlight.checkpoint.progress import Progress
from firstlight.units import format_bytes, format_rate, format_seconds

# Work that ends sooner than this shows nothing; a log gets a line at this distance.
SHOW_AFTER_SECONDS = 1.0
LINE_SECONDS = 5.0


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Gives a callback `(phase, done, total, unit)` in bytes that draws on stderr while open."""
    if sys.stderr.isatty():
        with _bars() as show:
            yield show
    else:
        yield LineProgress(sys.stderr.write)


class LineProgress:
    """Writes one line every few seconds, and one at the end of a phase that took that long."""

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._phase = ""
        self._started = self._last = clock()

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """Takes a report of the work; writes it when the last line is old enough."""
        now = self._clock()
        if phase != self._phase:
            self._phase, self._started, self._last = phase, now, now
        elapsed = now - self._started
        ended = total > 0 and done >= total and elapsed >= LINE_SECONDS and self._last < now
        if now - self._last >= LINE_SECONDS or ended:
            self._last = now
            self._write(progress_line(phase, done, total, unit, elapsed=elapsed) + "\n")


def progress_line(phase: str, done: int, total: int, unit: str, *, elapsed: float) -> str:
    """One line: phase, share, bytes, rate, time left, and what is worked on."""
    share = f"{100 * done / total:.0f}%" if total else "-"
    left = format_seconds(elapsed * (total - done) / done) if done and total else "-"
    return (
        f"{phase}: {share} of {format_bytes(total)}, {format_rate(done, elapsed)}, "
        f"{left} left, {unit}"
    )


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[unit]}"),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}
    started = time.monotonic()

    def show(phase: str, done: int, total: int, unit: str) -> None:
        if time.monotonic() - started < SHOW_AFTER_SECONDS:
            return
        if phase not in tasks:
            bars.start()
            tasks[phase] = bars.add_task(phase, total=total, unit=unit)
        bars.update(tasks[phase], completed=done, total=total, unit=unit)

    try:
        yield show
    finally:
        bars.stop()
