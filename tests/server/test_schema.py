"""Tests that the OpenAPI document is true: generated requests get only what it declares."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.config import SchemathesisConfig

from firstlight.server.app import create_app
from firstlight.server.response_models import ChatChunk

BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# 400: what one field may be can depend on another, or on the vocabulary; 404: names of models
CONFIG = {
    "generation": {"mode": "all"},
    "checks": {
        "positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404"]},
        "not_a_server_error": {"expected-statuses": ["2xx", "4xx"]},
    },
}


@pytest.fixture(scope="module")
def document(server: Any) -> Any:
    return schemathesis.openapi.from_url(
        server.url + "/openapi.json", config=SchemathesisConfig.from_dict(CONFIG)
    )


PLAIN_BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
}


@pytest.mark.parametrize("path", sorted(PLAIN_BODIES))
def test_completions_are_as_declared(document: Any, path: str) -> None:
    operation = document[path]["POST"]
    # Whether a generated body is ever served is chance; one that must be is asked for here.
    plain = operation.Case(
        body={"model": "small", **PLAIN_BODIES[path]}, media_type="application/json"
    )
    answer = plain.call_and_validate()
    assert answer.status_code == 200, answer.text
    assert 400 in try_operation(operation)


def test_everything_else_is_as_declared(document: Any) -> None:
    for path in document:
        if "completions" not in path:
            for method in document[path]:
                try_operation(document[path][method])


def try_operation(operation: Any) -> set[int]:
    """Sends generated requests and holds the answers against the document; gives the statuses.

    Where there is a body to get wrong, half of the requests are wrong.
    """
    statuses = set()
    takes_body = bool(operation.body)
    for mode in schemathesis.GenerationMode:
        if mode is schemathesis.GenerationMode.NEGATIVE and not takes_body:
            continue

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=mode))
        def holds(case: schemathesis.Case) -> None:
            statuses.add(case.call_and_validate().status_code)

        holds()
    return statuses


def test_the_document_names_every_path_and_model(server: Any) -> None:
    found = server.get("/openapi.json").json()
    assert set(found["paths"]) >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/startup",
        "/metrics",
        "/version",
    }
    chat = found["components"]["schemas"]["ChatRequest"]
    assert chat["properties"]["model"]["enum"] == ["small", "alias"]
    assert chat["additionalProperties"] is False


def test_every_event_of_a_stream_is_a_chunk(server: Any) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    answer: httpx.Response = server.post("/v1/chat/completions", {**body, "stream": True})
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        assert event.startswith("data: ")
        ChatChunk.model_validate_json(event.removeprefix("data: "), strict=True)


def test_a_key_is_declared_where_it_is_needed(make_server: Any) -> None:
    paths = create_app(make_server(api_keys=("k",)).context).openapi()["paths"]
    assert "security" in paths["/v1/models"]["get"] and "security" not in paths["/health"]["get"]
