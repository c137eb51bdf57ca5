"""Owns how anything that goes wrong becomes an OpenAI error body with the right status.

Knows our error tree and HTTP, and nothing of models or of how requests are served.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from firstlight.errors import EnvironmentProblem, FirstlightError, RequestError
from firstlight.server.response_models import ErrorBody, ErrorDetail

_LOG = logging.getLogger("firstlight.server")
MAX_LISTED = 20
QUEUE_FULL = "queue_full"
DRAINING = "draining"
# Why no request is taken, and the code clients get with a 503.
_CLOSED = {DRAINING: "shutting_down", "reloading": "reloading", "unhealthy": "engine_unavailable"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_SERVICE = {500: "server_error", 503: "service_unavailable"}
_REFUSED = {
    "best_of": "best_of is not served; ask for n choices instead",
    "suffix": "suffix is not served: this model completes text only forwards",
    "tool_choice": 'it must be "none", "auto", "required" or the object that names a function',
}


class ApiFailure(Exception):
    """An answer with an error status; `parameter` names the offending field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the status."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
        return headers

    def to_body(self, request_id: str) -> ErrorBody:
        """The OpenAI error body."""
        kind = _TYPES.get(self.status) or _SERVICE.get(self.status) or "invalid_request_error"
        return ErrorBody(
            error=ErrorDetail(
                message=str(self),
                type=kind,
                param=self.parameter,
                code=self.code,
                request_id=request_id,
            )
        )

    def to_response(self, request_id: str) -> Response:
        """The whole HTTP answer."""
        return Response(
            self.to_body(request_id).model_dump_json(),
            self.status,
            self.headers,
            "application/json",
        )


def to_failure(problem: Exception, *, retry_after_seconds: int) -> ApiFailure:
    """Maps any exception to the answer it deserves; an unknown one is logged and says nothing."""
    if isinstance(problem, ApiFailure):
        return problem
    if isinstance(problem, RequestError):
        if problem.code in _CLOSED:
            return unavailable(str(problem), retry_after_seconds, code=_CLOSED[problem.code])
        full = problem.code == QUEUE_FULL
        return ApiFailure(
            429 if full else 400,
            str(problem),
            parameter=problem.parameter,
            code=problem.code,
            retry_after_seconds=retry_after_seconds if full else None,
        )
    if isinstance(problem, EnvironmentProblem):
        return unavailable(str(problem), retry_after_seconds, code="engine_unavailable")
    if isinstance(problem, FirstlightError):
        return ApiFailure(500, str(problem), code="engine_error")
    _LOG.error("a bug in firstlight ended a request", exc_info=problem)
    return ApiFailure(
        500,
        "firstlight failed in a way it did not foresee; the server log has the details under this "
        "request id",
        code="internal_error",
    )


def unavailable(message: str, retry_after_seconds: int, *, code: str) -> ApiFailure:
    """A 503 that tells when to come back."""
    return ApiFailure(503, message, code=code, retry_after_seconds=retry_after_seconds)


def from_validation(problem: ValidationError) -> ApiFailure:
    """Turns pydantic's errors into one 400 that names every offending field."""
    found = problem.errors(include_url=False, include_input=False)
    unknown = [path_of(error["loc"]) for error in found if error["type"] == "extra_forbidden"]
    if unknown:
        listed = ", ".join(unknown[:MAX_LISTED]) + ("" if len(unknown) <= MAX_LISTED else ", ...")
        word = "field is" if len(unknown) == 1 else "fields are"
        return ApiFailure(
            400,
            f"{len(unknown)} {word} not known here: {listed}; remove them",
            parameter=unknown[0],
            code="unknown_field",
        )
    parts = [_sentence(error) for error in found[:MAX_LISTED]]
    return ApiFailure(
        400, "; ".join(parts), parameter=path_of(found[0]["loc"]) or None, code="invalid_value"
    )


def _sentence(error: Mapping[str, Any]) -> str:
    path = path_of(error["loc"])
    if path in _REFUSED and error["type"] != "missing":
        return f"{path}: {_REFUSED[path]}"
    if error["type"] == "missing":
        return f"{path}: this field is required"
    if error["type"] == "string_pattern_mismatch":
        return f"{path}: this key is no token id"
    return f"{path}: {error['msg']}" if path else str(error["msg"])


def path_of(location: Sequence[str | int]) -> str:
    """Writes where in the body a field stands: `messages[0].content`."""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(("$", "[")) and not _is_role(location, index):
            path += f".{step}" if path else step
    return path


def _is_role(location: Sequence[str | int], index: int) -> bool:
    """Says whether a step is the name of a message's kind, which pydantic puts after its index."""
    return index == 2 and location[0] == "messages"


def request_id_of(request: Request) -> str:
    """The id the outermost layer gave this request."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id
