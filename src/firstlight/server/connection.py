"""Owns the time a client may take to send a request's header; slower connections are closed.

Knows HTTP/1.1 parsing states; nothing of requests.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def guarded_protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """Makes the protocol class of a server whose clients must be this quick with each header."""

    class GuardedProtocol(H11Protocol):
        """HTTP/1.1 with a clock that runs while a header is incomplete."""

        _clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.access_log = False  # the server's own log line has more, and no query
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Starts the clock when a header is awaited and stops it when one has come."""
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self._clock is None:
                self._clock = self.loop.call_later(header_seconds, self._expire)

        def _expire(self) -> None:
            self._clock = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

        def _stop(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

    return GuardedProtocol
