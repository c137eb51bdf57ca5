"""Owns the shape of a progress callback; knows neither who reports nor how it is shown."""

from typing import Protocol


class Progress(Protocol):
    """Called by one thread at a time, which need not be the one that started the work; several
    times a second at most for loads.

    `done` and `total` are bytes; `unit` is the store unit, file or tensor now worked on.
    """

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """Takes one report."""
        ...


def silent(phase: str, done: int, total: int, unit: str) -> None:
    """A progress callback that shows nothing."""
