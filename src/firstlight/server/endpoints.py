"""Owns the handlers of every path, and the checks that come before the engine is asked.

Knows every part of the server and nothing of how any of them works.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request, Response

from firstlight.metrics.events import EngineSeen, ProcessMemory
from firstlight.metrics.exposition import Exposition
from firstlight.metrics.series import resident_bytes
from firstlight.server.chat import to_chat_job
from firstlight.server.chat_shape import ChatShape
from firstlight.server.completions import CompletionShape, to_completion_job
from firstlight.server.context import AppContext
from firstlight.server.delivery import Delivery, json_response
from firstlight.server.failures import ApiFailure, unavailable
from firstlight.server.generation import Generation
from firstlight.server.health import check_health, check_ready, startup_timeline
from firstlight.server.json_body import read_body
from firstlight.server.request_fields import SamplingFields
from firstlight.server.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReloadRequest,
    TokenizeRequest,
)
from firstlight.server.response_models import ModelCard, ModelList, Ready, Version
from firstlight.server.serving_state import ServingState
from firstlight.server.tokens import detokenize, tokenize
from firstlight.server.weights import check_weights, reload_weights

Fields = TypeVar("Fields", bound=SamplingFields)
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Endpoints:
    """The handlers, with what they share."""

    def __init__(self, context: AppContext, serving: ServingState) -> None:
        self.context = context
        self.serving = serving
        self._exposition = Exposition(self._series)

    async def chat(self, request: Request) -> Response:
        """Answers a conversation, whole or as a stream of server-sent events."""
        fields = await self._admit(request, ChatRequest)
        job = await to_chat_job(fields, self.context, f"chatcmpl-{uuid.uuid4().hex}")
        shape = ChatShape(fields, job, context=self.context, created=int(time.time()))
        delivery = Delivery(
            Generation(job, self.context), shape, context=self.context, state=self.serving
        )
        return await self._deliver(delivery, fields, request)

    async def completions(self, request: Request) -> Response:
        """Continues one or several prompts, given as text or as token ids.

        Control tokens written in a text prompt are read as control tokens; chat messages never are.
        """
        fields = await self._admit(request, CompletionRequest)
        job = await to_completion_job(fields, self.context, f"cmpl-{uuid.uuid4().hex}")
        shape = CompletionShape(fields, job, context=self.context, created=int(time.time()))
        delivery = Delivery(
            Generation(job, self.context), shape, context=self.context, state=self.serving
        )
        return await self._deliver(delivery, fields, request)

    async def models(self) -> Response:
        """Lists the served models."""
        cards = [self._card(name) for name in self.context.model_names]
        return json_response(ModelList(object="list", data=cards))

    async def model(self, name: str) -> Response:
        """Describes one served model."""
        self._check_model(name)
        return json_response(self._card(name))

    async def tokenize(self, request: Request) -> Response:
        """Turns a text, or messages, into token ids."""
        fields = await read_body(request, TokenizeRequest, self.context.limits)
        self._check_model(fields.model)
        return json_response(await tokenize(fields, self.context))

    async def detokenize(self, request: Request) -> Response:
        """Turns token ids into text."""
        fields = await read_body(request, DetokenizeRequest, self.context.limits)
        self._check_model(fields.model)
        return json_response(await detokenize(fields, self.context))

    async def health(self) -> Response:
        """200 while the engine makes progress, loading included; 503 once it hangs or is gone."""
        found = check_health(self.context.engine, self.context.limits)
        return json_response(found, 200 if found.healthy else 503)

    async def ready(self) -> Response:
        """200 once the start-up gate has passed; 503 with the phase before, and while draining.

        It is 503 whenever /health is.
        """
        found = self._probe()
        return json_response(found, 200 if found.ready else 503)

    async def startup(self) -> Response:
        """The timeline of the start."""
        return json_response(startup_timeline(self.context.engine))

    async def metrics(self) -> Response:
        """Metrics of this process and the engine in the Prometheus text format."""
        engine, recorder = self.context.engine, self.context.recorder
        ready = self._probe().ready
        seen = EngineSeen(engine.status_age_seconds, engine.stalled_seconds, ready)
        recorder.record(seen)
        recorder.record(ProcessMemory("api", resident_bytes()))
        return Response(self._exposition.render(), media_type=_PROMETHEUS)

    async def check_weights(self) -> Response:
        """Has every rank compare all its weights in memory with what it loaded, now.

        200 with what was found, damage included; the service is unhealthy from then on.
        """
        return json_response(await check_weights(self.context))

    async def reload_weights(self, request: Request) -> Response:
        """Reads weights again in place once running requests have ended; others get 503 till then.

        Another source than the one served needs a service with an API key.
        """
        fields = await read_body(request, ReloadRequest, self.context.limits)
        return json_response(await reload_weights(fields, self.context))

    async def version(self) -> Response:
        """The version of firstlight."""
        return json_response(Version(version=self.context.version))

    def _probe(self) -> Ready:
        context = self.context
        return check_ready(context.engine, draining=self.serving.draining, limits=context.limits)

    async def _admit(self, request: Request, model: type[Fields]) -> Fields:
        """Reads a request that needs the engine; raises 503 unless the engine can serve it."""
        fields = await read_body(request, model, self.context.limits)
        self._check_model(fields.model)
        if fields.stream_options is not None and not fields.stream:
            raise ApiFailure(400, "stream_options needs stream: true", parameter="stream_options")
        found = check_ready(self.context.engine, draining=self.serving.draining)
        if not found.ready:
            raise self._not_ready(found)
        return fields

    def _not_ready(self, found: Ready) -> ApiFailure:
        seconds = self.context.limits.retry_after_seconds
        if found.draining:
            return unavailable("the server shuts down", seconds, code="shutting_down")
        if found.failure is not None:
            status = self.context.engine.status
            failed = status is not None and status.failure is not None
            message = f"the engine has failed: {found.failure}" if failed else found.failure
            return unavailable(message, seconds, code="engine_unavailable")
        phase = f", it is in the phase {found.phase}" if found.phase else ""
        return unavailable(f"the model is not ready yet{phase}", seconds, code="not_ready")

    async def _deliver(
        self, delivery: Delivery, fields: SamplingFields, request: Request
    ) -> Response:
        if not fields.stream:
            return await delivery.whole(request)
        options = fields.stream_options
        return delivery.events(with_usage=bool(options and options.include_usage))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.context.model_names:
            served = ", ".join(self.context.model_names)
            raise ApiFailure(
                404,
                f"the model {name[:200]!r} is not served here; this server has {served}",
                parameter="model",
                code="model_not_found",
            )

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=self.context.created,
            owned_by="firstlight",
            max_model_len=self.context.context_length,
        )

    def _series(self) -> tuple[Mapping[str, float], ...]:
        status = self.context.engine.status
        return (self.context.read_series(), {} if status is None else status.metrics)
