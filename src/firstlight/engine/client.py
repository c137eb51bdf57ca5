"""Owns the API process's side of the engine: submit, stream, cancel, and what is known of its
health.

Knows neither HTTP nor tensors. Over ZeroMQ by default; tests and single devices may run the engine
in process behind the same interface.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from firstlight.engine.messages import Output, Status, WeightsReloaded, WeightsReport
from firstlight.schedule.request import SubmittedRequest


class EngineClient(Protocol):
    """What a server needs of an engine."""

    @property
    def status(self) -> Status | None:
        """The newest heartbeat; None before the first."""
        ...

    @property
    def status_age_seconds(self) -> float:
        """Seconds since the newest heartbeat arrived."""
        ...

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which a busy engine has made no progress; 0 when idle."""
        ...

    def submit(self, requests: Sequence[SubmittedRequest]) -> AsyncIterator[Output]:
        """Yields outputs of all these requests until each has finished.

        Closing the iterator early cancels what is unfinished. Raises RequestError when the engine
        refuses a request and EnvironmentProblem when the engine is gone.
        """
        ...

    async def check_weights(self) -> WeightsReport:
        """Has every rank read all its weights and compare them with what it loaded.

        Raises EnvironmentProblem when the engine is gone.
        """
        ...

    async def reload_weights(self, source: str | None) -> WeightsReloaded:
        """Has weights read again in place once running requests have finished, from the source they
        came from when none is given.

        Raises EnvironmentProblem when the engine is gone.
        """
        ...

    async def drain(self) -> None:
        """Lets running requests finish, refuses new ones, returns when the engine has ended."""
        ...

    async def close(self) -> None:
        """Releases sockets; the engine goes on."""
        ...
