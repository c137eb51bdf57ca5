"""Owns what changes while a server lives: requests in flight, and whether it drains.

Knows nothing of what the requests are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ServingState:
    """Counts the requests in flight; `draining` refuses new ones, `expired` ends running ones."""

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.draining = False
        self.expired = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """Counts a request for as long as the block runs."""
        self.num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests and waits for running ones; False when the time was not enough.

        Those that are left then end with an error.
        """
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            self.expired.set()
            return False
        return True
