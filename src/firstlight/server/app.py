"""Owns the HTTP application: which path does what, as the OpenAPI document states it.

Knows paths, answers and error statuses; nothing of how requests are served.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from firstlight.server.context import AppContext
from firstlight.server.endpoints import Endpoints
from firstlight.server.failures import ApiFailure, request_id_of
from firstlight.server.middleware import Envelope
from firstlight.server.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReloadRequest,
    TokenizeRequest,
)
from firstlight.server.response_models import (
    ChatCompletion,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    Ready,
    Startup,
    TextCompletion,
    Tokenized,
    Version,
    WeightsChecked,
    WeightsReloaded,
)
from firstlight.server.schema import (
    Responses,
    body_of,
    build_schema,
    error_responses,
    event_stream,
)
from firstlight.server.serving_state import ServingState

_READ = (400, 401, 404, 408, 413, 415, 500)
_GENERATE = (*_READ, 429, 503)


def create_app(context: AppContext) -> FastAPI:
    """Builds the application; `app.state.serving` is its ServingState."""
    serving = ServingState()
    app = FastAPI(
        title="firstlight",
        version=context.version,
        description="An OpenAI-compatible service.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.serving = serving
    endpoints = Endpoints(context, serving)
    app.include_router(completion_routes(endpoints))
    app.include_router(model_routes(endpoints))
    app.include_router(operation_routes(endpoints))
    app.include_router(weight_routes(endpoints))
    app.add_exception_handler(HTTPException, _no_such_path)
    document = build_schema(app, context)
    routes = frozenset(document["paths"])
    app.add_middleware(Envelope, context=context, serving=serving, routes=routes)
    app.openapi = lambda: document  # type: ignore[method-assign]
    return app


async def _no_such_path(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    what = f"{request.method} {request.url.path}"
    failure = ApiFailure(problem.status_code, f"{what}: {problem.detail}", code="no_such_path")
    response = failure.to_response(request_id_of(request))
    response.headers.update(problem.headers or {})
    return response


def completion_routes(endpoints: Endpoints) -> APIRouter:
    """The paths that need the engine."""
    router = APIRouter(tags=["completions"])
    router.add_api_route(
        "/v1/chat/completions",
        endpoints.chat,
        methods=["POST"],
        response_model=ChatCompletion,
        responses={**error_responses(*_GENERATE), **event_stream("The answer, or its events")},
        openapi_extra=body_of(ChatRequest),
    )
    router.add_api_route(
        "/v1/completions",
        endpoints.completions,
        methods=["POST"],
        response_model=TextCompletion,
        responses={**error_responses(*_GENERATE), **event_stream("The answer, or its events")},
        openapi_extra=body_of(CompletionRequest),
    )
    return router


def model_routes(endpoints: Endpoints) -> APIRouter:
    """The paths that need the tokenizer or only the names."""
    router = APIRouter(tags=["models"])
    errors = error_responses(401, 500)
    router.add_api_route("/v1/models", endpoints.models, response_model=ModelList, responses=errors)
    router.add_api_route(
        "/v1/models/{name:path}",
        endpoints.model,
        response_model=ModelCard,
        responses=error_responses(401, 404, 500),
    )
    _post(router, "/tokenize", endpoints.tokenize, TokenizeRequest, Tokenized)
    _post(router, "/detokenize", endpoints.detokenize, DetokenizeRequest, Detokenized)
    return router


def weight_routes(endpoints: Endpoints) -> APIRouter:
    """The paths that look after the weights in memory."""
    router = APIRouter(tags=["operation"])
    router.add_api_route(
        "/weights/check",
        endpoints.check_weights,
        methods=["POST"],
        response_model=WeightsChecked,
        responses=error_responses(401, 500, 503),
    )
    router.add_api_route(
        "/weights/reload",
        endpoints.reload_weights,
        methods=["POST"],
        response_model=WeightsReloaded,
        responses=error_responses(*_READ, 409, 503),
        openapi_extra=body_of(ReloadRequest),
    )
    return router


def _post(
    router: APIRouter, path: str, handler: Any, body: type[BaseModel], answer: type[BaseModel]
) -> None:
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        response_model=answer,
        responses=error_responses(*_READ),
        openapi_extra=body_of(body),
    )


def operation_routes(endpoints: Endpoints) -> APIRouter:
    """The paths for those who operate the service."""
    router = APIRouter(tags=["operation"])
    for path, handler, model in (
        ("/health", endpoints.health, Health),
        ("/ready", endpoints.ready, Ready),
    ):
        unhappy: Responses = {503: {"model": model, "description": "Not so"}}
        responses = {**error_responses(401, 500), **unhappy}
        router.add_api_route(path, handler, response_model=model, responses=responses)
    errors = error_responses(401, 500)
    router.add_api_route("/startup", endpoints.startup, response_model=Startup, responses=errors)
    router.add_api_route("/version", endpoints.version, response_model=Version, responses=errors)
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    router.add_api_route(
        "/metrics",
        endpoints.metrics,
        response_class=Response,
        responses={**errors, **text},
    )
    return router
