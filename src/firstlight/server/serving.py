"""Owns the server process's life: its signals, its drain, and what ends it.

Knows uvicorn and the engine's health; nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from firstlight.errors import EnvironmentProblem
from firstlight.server.app import create_app
from firstlight.server.connection import guarded_protocol
from firstlight.server.context import AppContext
from firstlight.server.serving_state import ServingState

_LOG = logging.getLogger("firstlight.server")
_WATCH_SECONDS = 0.2
_CLOSE_SECONDS = 5


class Server(uvicorn.Server):
    """A uvicorn server whose first signal begins a drain and whose second ends it at once."""

    def __init__(self, config: uvicorn.Config, asked_to_end: asyncio.Event) -> None:
        super().__init__(config)
        self.num_signals = 0
        self.asked_to_end = asked_to_end
        self._own_loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes note of a signal; nothing is raised again when the server has ended."""
        self.num_signals += 1
        _LOG.info("received %s", signal.Signals(sig).name)
        self._own_loop.call_soon_threadsafe(self.asked_to_end.set)
        if self.num_signals > 1:
            self.force_exit = self.should_exit = True


async def serve_app(
    context: AppContext, listener: socket.socket, *, asked_to_end: asyncio.Event | None = None
) -> int:
    """Serves until a signal or the engine's failure ends it, and returns the exit code.

    A first SIGTERM or SIGINT, or setting `asked_to_end`, begins a drain: new requests get 503,
    running ones may finish within `limits.drain_seconds`, then the engine is drained and the code
    is 0. A second signal ends it at once with code 1, a failed engine with its own code. The engine
    client is closed in any case.
    """
    app = create_app(context)
    server = Server(_config(app, context), asked_to_end or asyncio.Event())
    ending = asyncio.create_task(_end(server, app.state.serving, context))
    try:
        await server.serve(sockets=[listener])
        return await ending if server.num_signals < 2 else 1
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await context.engine.close()


def _config(app: FastAPI, context: AppContext) -> uvicorn.Config:
    limits = context.limits
    return uvicorn.Config(
        app,
        http=guarded_protocol(limits.header_seconds),
        ws="none",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_config=None,
        proxy_headers=False,
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        h11_max_incomplete_event_size=limits.max_header_bytes,
    )


async def _end(server: Server, serving: ServingState, context: AppContext) -> int:
    """Waits for a reason to end, brings the server to its end, and returns the exit code."""
    failure = await _reason(server, context)
    if failure is not None:
        serving.draining = True
        _LOG.error("the engine has failed: %s", failure)
        status = context.engine.status
        server.should_exit = True
        return (status.exit_code if status is not None else 0) or 1
    seconds = context.limits.drain_seconds
    _LOG.info("draining: %d requests run, they have %g s", serving.num_in_flight, seconds)
    if not await serving.drain(seconds):
        _LOG.warning("the drain ran out of time; %d requests are ended", serving.num_in_flight)
    with contextlib.suppress(asyncio.TimeoutError, EnvironmentProblem):
        await asyncio.wait_for(context.engine.drain(), _CLOSE_SECONDS)
    server.should_exit = True
    return 0


async def _reason(server: Server, context: AppContext) -> str | None:
    """Waits until a signal came (None) or the engine has failed (why); logs what is unhealthy."""
    known: str | None = None
    while not server.asked_to_end.is_set():
        status = context.engine.status
        if status is not None and status.failure is not None:
            return status.failure
        if status is not None and status.unhealthy != known:
            known = status.unhealthy
            _LOG.error("%s", f"unhealthy: {known}" if known else "healthy again")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(server.asked_to_end.wait(), _WATCH_SECONDS)
    return None
