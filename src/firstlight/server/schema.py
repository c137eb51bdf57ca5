"""Owns the OpenAPI document: request bodies, every error status, and the key.

Knows the models of requests and answers; nothing of how they are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from firstlight.server.context import AppContext
from firstlight.server.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReloadRequest,
    TokenizeRequest,
)
from firstlight.server.response_models import ErrorBody

Responses = dict[int | str, dict[str, Any]]
BODIES: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ReloadRequest,
)
_REFERENCE = "#/components/schemas/{model}"
_ERRORS: Mapping[int, str] = {
    400: "The request is not what it must be",
    401: "No valid API key",
    404: "The model is not served here",
    408: "The body did not arrive in time",
    409: "Weights are being reloaded already",
    413: "The body is too large",
    415: "The body is declared as something other than JSON",
    429: "The queue is full; Retry-After says when to come back",
    500: "The engine could not finish the request",
    503: "Not ready, draining, or the engine is gone",
}


def error_responses(*statuses: int) -> Responses:
    """Declares error answers of an operation."""
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Declares the body of an operation that reads it itself."""
    reference = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def event_stream(description: str) -> Responses:
    """Declares that an operation may answer with server-sent events."""
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}


def build_schema(app: FastAPI, context: AppContext) -> dict[str, Any]:
    """Makes the OpenAPI document of an app."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in BODIES], ref_template=_REFERENCE
    )
    for definition in definitions["$defs"].values():
        _name_models(definition.get("properties", {}), context.model_names)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    if context.api_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            if path not in context.open_paths:
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
    return document


def _name_models(properties: dict[str, Any], names: tuple[str, ...]) -> None:
    """States which names the field `model` may have."""
    field = properties.get("model", {})
    for branch in (field, *field.get("anyOf", ())):
        if branch.get("type") == "string":
            branch["enum"] = list(names)
