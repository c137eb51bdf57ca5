"""Owns how a request body is read: its size, its time, strict JSON, and the model it must match.

Knows nothing of what the bodies mean.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from firstlight.server.context import Limits
from firstlight.server.failures import ApiFailure, from_validation
from firstlight.units import format_bytes

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body], limits: Limits) -> Body:
    """Reads and checks the body of a request.

    Raises ApiFailure: 408 when it does not arrive in time, 413 when it is too large, 415 when it is
    declared as something else, 400 when it is no JSON or not what `model` says.
    """
    declared = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if declared.lower() != "application/json":
        raise ApiFailure(
            415, f"the body is declared as {declared!r}; send application/json", code="not_json"
        )
    content = await _read_bytes(request, limits)
    value = _parse(content)
    try:
        return model.model_validate(value)
    except ValidationError as problem:
        raise from_validation(problem) from problem


async def _read_bytes(request: Request, limits: Limits) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_collect(request, limits), limits.body_seconds)
    except asyncio.TimeoutError as problem:
        raise ApiFailure(
            408, f"the body did not arrive within {limits.body_seconds:g} s", code="timeout"
        ) from problem


async def _collect(request: Request, limits: Limits) -> bytes:
    pieces = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces += message.get("body", b"")
        if len(pieces) > limits.max_body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return bytes(pieces)


def _too_large(limits: Limits) -> ApiFailure:
    return ApiFailure(
        413,
        f"the body is larger than {format_bytes(limits.max_body_bytes)}, the limit of this server",
        code="body_too_large",
    )


def _parse(content: bytes) -> object:
    """Parses JSON; NaN, infinities, lone surrogates and more than 200 levels are refused."""
    try:
        return pydantic_core.from_json(content, allow_inf_nan=False)
    except ValueError as problem:
        raise ApiFailure(
            400, f"the body is no valid JSON: {problem}", code="invalid_json"
        ) from problem
