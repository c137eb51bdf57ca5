"""Owns getting an answer to the client, whole or as server-sent events, while it is wanted.

Knows nothing of models or prompts: an answer's shape is given to it. A client that goes away, or a
drain that runs out of time, ends the work at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstlight.server.choice import Delta
from firstlight.server.context import AppContext
from firstlight.server.failures import to_failure, unavailable
from firstlight.server.generation import Generation
from firstlight.server.response_models import Usage
from firstlight.server.serving_state import ServingState

Result = TypeVar("Result")
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Shape(Protocol):
    """How deltas are written for one endpoint."""

    def chunks(self, delta: Delta) -> Iterable[BaseModel]:
        """The events a delta becomes."""
        ...

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The event with the token counts, which has no choices."""
        ...

    def whole(self, deltas: list[Delta], usage: Usage) -> BaseModel:
        """The whole answer."""
        ...


class Delivery:
    """Delivers one generation to one client."""

    def __init__(
        self, generation: Generation, shape: Shape, *, context: AppContext, state: ServingState
    ) -> None:
        self.generation = generation
        self._shape = shape
        self.context = context
        self.state = state

    async def whole(self, request: Request) -> Response:
        """Waits for the whole answer."""
        content = await while_wanted(
            self._collect(), request.receive, self.state, self.context.limits.retry_after_seconds
        )
        _summarise(request.scope, self.generation.usage)
        return json_response(content)

    def events(self, *, with_usage: bool) -> EventStream:
        """Answers with server-sent events."""
        return EventStream(self, with_usage=with_usage)

    async def _collect(self) -> BaseModel:
        async with aclosing(self.generation.deltas()) as deltas:
            found = [delta async for delta in deltas]
        return self._shape.whole(found, self.generation.usage)

    async def parts(self, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
        """The events of the stream, each whole."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                written = b"".join(_event(chunk) for chunk in self._shape.chunks(delta))
                if written:
                    yield written
        if with_usage:
            yield _event(self._shape.usage_chunk(self.generation.usage))


class EventStream(Response):
    """Sends events as they come.

    Nothing is sent before the first event, so that a refusal has its own status; when that takes
    long, comments keep the connection alive, and a later failure is an event with an error body.
    """

    media_type = "text/event-stream"

    def __init__(self, delivery: Delivery, *, with_usage: bool) -> None:
        super().__init__(headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self._delivery = delivery
        self._with_usage = with_usage
        self._lock = asyncio.Lock()
        self._has_begun = False
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream."""
        delivery = self._delivery
        retry = delivery.context.limits.retry_after_seconds
        ticker = asyncio.create_task(self._tick(send))
        try:
            await while_wanted(self._send_parts(send), receive, delivery.state, retry)
        except ClientDisconnect:
            scope["state"]["client_gone"] = True
            raise
        except Exception as problem:
            if not self._has_begun:
                raise
            failure = to_failure(problem, retry_after_seconds=retry)
            await self._write(send, _event(failure.to_body(scope["state"]["request_id"])))
        finally:
            ticker.cancel()
            _summarise(scope, delivery.generation.usage)
        await self._write(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_parts(self, send: Send) -> None:
        async with aclosing(self._delivery.parts(with_usage=self._with_usage)) as parts:
            async for part in parts:
                await self._write(send, part)

    async def _tick(self, send: Send) -> None:
        every = self._delivery.context.limits.keepalive_seconds
        while True:
            await asyncio.sleep(max(0.01, self._sent_at + every - time.monotonic()))
            if time.monotonic() - self._sent_at >= every:
                await self._write(send, b": still working\n\n")

    async def _write(self, send: Send, body: bytes) -> None:
        async with self._lock:
            if not self._has_begun:
                self._has_begun = True
                headers = self.raw_headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._sent_at = time.monotonic()


async def while_wanted(
    work: Coroutine[Any, Any, Result], receive: Receive, state: ServingState, retry_seconds: int
) -> Result:
    """Runs `work` until it ends, the client goes away or the drain runs out of time.

    Raises ClientDisconnect or a 503 in the last two cases, after the work has been cancelled and
    has cleaned up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    late = asyncio.ensure_future(state.expired.wait())
    everything = (task, gone, late)
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if late.done():
            raise unavailable(
                "the server shuts down and the time to finish is over; send the request again",
                retry_seconds,
                code="shutting_down",
            )
        raise ClientDisconnect
    finally:
        for one in everything:
            one.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


def json_response(content: BaseModel, status: int = 200) -> Response:
    """Writes an answer; optional fields that were not set are left out."""
    return Response(content.model_dump_json(exclude_unset=True), status, None, "application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def _summarise(scope: Scope, usage: Usage) -> None:
    scope["state"]["summary"] = f" {usage.prompt_tokens}+{usage.completion_tokens} tokens"
