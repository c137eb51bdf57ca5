"""Owns what surrounds every request: its id, its key, its log line, and the answer to a failure.

Knows paths and statuses; never looks into a body, so no prompt text can reach the log.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.metrics.events import HttpAnswered
from firstlight.server.context import AppContext
from firstlight.server.failures import ApiFailure, to_failure
from firstlight.server.serving_state import ServingState
from firstlight.units import format_seconds

_LOG = logging.getLogger("firstlight.server.access")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
CLIENT_GONE = 499
REQUEST_ID = "x-request-id"


class Envelope:
    """The outermost layer. A request id from the client is kept when it is short and plain."""

    def __init__(
        self, app: ASGIApp, context: AppContext, serving: ServingState, routes: frozenset[str]
    ) -> None:
        self._app = app
        self._context = context
        self._serving = serving
        self._routes = routes
        self._keys = tuple(key.encode() for key in context.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request; anything but HTTP passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, send)
        began = time.perf_counter()
        try:
            self._check_key(scope, exchange.headers)
            with self._serving.one_request():
                await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = exchange.status or CLIENT_GONE
        except Exception as problem:
            await self._answer_failure(exchange, problem, receive)
        finally:
            self._note(exchange, time.perf_counter() - began)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys or scope["path"] in self._context.open_paths:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = given.strip().encode()
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiFailure(
                401,
                "no valid API key came with the request; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def _answer_failure(
        self, exchange: Exchange, problem: Exception, receive: Receive
    ) -> None:
        seconds = self._context.limits.retry_after_seconds
        failure = to_failure(problem, retry_after_seconds=seconds)
        if exchange.status:
            return  # the answer has begun: all that is left is to end the connection
        response = failure.to_response(exchange.request_id)
        await response(exchange.scope, receive, exchange.send)

    def _note(self, exchange: Exchange, seconds: float) -> None:
        status = exchange.status or CLIENT_GONE
        if exchange.scope["state"].get("client_gone"):
            status = CLIENT_GONE
        path = exchange.scope["path"]
        known = path if path in self._routes else "other"
        self._context.recorder.record(HttpAnswered(known, status))
        _LOG.info(
            "%s %s %s %d %s%s",
            exchange.request_id,
            exchange.scope["method"],
            known,
            status,
            format_seconds(seconds),
            exchange.scope["state"].get("summary", ""),
        )


class Exchange:
    """One request and what was answered so far; adds the request id to the answer's headers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        given = self.headers.get(REQUEST_ID, "")
        self.request_id = given if _REQUEST_ID.match(given) else f"req-{uuid.uuid4().hex}"
        self.status = 0
        self._send = send
        scope["state"] = {**scope.get("state", {}), "request_id": self.request_id}

    async def send(self, message: Message) -> None:
        """Passes a message on to the client."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)
