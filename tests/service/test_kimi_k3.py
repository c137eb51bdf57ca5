"""Kimi K3's miniature through a real service and OpenAI's client: its random weights say nothing
sensible, so what holds is what the service itself must see to."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from live_service import LiveService
from openai_clients import openai_client

DATA = Path(__file__).parent.parent / "data" / "k3"
MESSAGES: Any = [{"role": "user", "content": "Go on."}]
CLOSE = {"388": 100}
"""Prefers the token that closes an element: texts without a bound then end where they may."""
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["round", "square"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "ping"}},
    {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    log = tmp_path_factory.mktemp("k3") / "serve.log"
    flags = ("--served-model-name", "k3", "--kv-budget-bytes", "64MiB", "--threads", "1")
    live = LiveService(DATA / "checkpoint", log, *flags)
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture
def client(service: LiveService) -> Iterator[openai.OpenAI]:
    with openai_client(service.url, timeout=120) as one:
        yield one


def ask(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    """Asks; `thinking=False` leaves the reasoning out."""
    thinking = fields.pop("thinking", True)
    body = {"chat_template_kwargs": {"thinking": thinking}}
    given = {"max_tokens": 300, "seed": 1, **fields}
    return client.chat.completions.create(model="k3", messages=messages, extra_body=body, **given)


def test_reasoning_is_told_apart_from_the_answer(client: openai.OpenAI) -> None:
    cut = ask(client, max_tokens=8)
    assert cut.choices[0].finish_reason == "length" and not cut.choices[0].message.content
    assert cut.choices[0].message.reasoning_content
    assert cut.usage.completion_tokens_details.reasoning_tokens == 8
    plain = ask(client, max_tokens=8, thinking=False)
    assert plain.choices[0].message.content
    assert getattr(plain.choices[0].message, "reasoning_content", None) is None
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_keeps_to_its_schema(client: openai.OpenAI, thinking: bool) -> None:
    bias = CLOSE if thinking else None
    answer = ask(client, response_format=JSON_SCHEMA, thinking=thinking, logit_bias=bias)
    thing = json.loads(answer.choices[0].message.content)
    assert thing["kind"] in ("round", "square") and 0 <= thing["size"] <= 99
    assert answer.choices[0].finish_reason == "stop"
    reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert (reasoning > 0) is thinking


def test_a_streamed_answer_keeps_to_its_schema_too(client: openai.OpenAI) -> None:
    options: Any = {"response_format": JSON_SCHEMA, "thinking": False}
    whole = ask(client, **options).choices[0].message.content
    chunks = list(ask(client, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_any_object_is_an_object(client: openai.OpenAI, service: LiveService) -> None:
    options: Any = {"response_format": {"type": "json_object"}, "thinking": False}
    ends = {"}": 100, "{": 90}  # a model left to itself would begin with the end
    bias = {str(token_id(service, text)): value for text, value in ends.items()}
    answer = ask(client, **options, logit_bias=bias)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def token_id(service: LiveService, text: str) -> int:
    with service.client() as plain:
        ids: list[int] = plain.post("/tokenize", json={"text": text}).json()["tokens"]
    assert len(ids) == 1
    return ids[0]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_must_be_made_is_made(
    client: openai.OpenAI, thinking: bool, stream: bool
) -> None:
    choice = {"type": "function", "function": {"name": "draw"}}
    answer = ask(
        client,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        thinking=thinking,
        stream=stream,
        logit_bias=CLOSE,
    )
    if stream:
        chunks = list(answer)
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        finish = chunks[-1].choices[0].finish_reason
    else:
        calls, finish = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert not answer.choices[0].message.content
    assert [call.function.name for call in calls] == ["draw"] and finish == "tool_calls"
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["kind"] in ("round", "square") and 0 <= arguments["size"] <= 99


def test_some_call_is_made_when_one_is_required(client: openai.OpenAI) -> None:
    answer = ask(client, tools=TOOLS, tool_choice="required", logit_bias=CLOSE)
    calls = answer.choices[0].message.tool_calls
    assert calls and {call.function.name for call in calls} <= {"ping", "draw"}
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "pong"}
    back = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), result]
    again = ask(client, back, tools=TOOLS, max_tokens=4)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def picture(name: str) -> dict[str, Any]:
    data = base64.b64encode((DATA / "cases/images" / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_images_take_part_in_the_prompt(client: openai.OpenAI, service: LiveService) -> None:
    text = {"type": "text", "text": "What is this?"}
    counts = []
    for names in ([], ["fit.png"], ["two_0.png", "two_1.png"]):
        message = {"role": "user", "content": [text, *map(picture, names)]}
        answer = ask(client, [message], max_tokens=4)
        counts.append(answer.usage.prompt_tokens)
        with service.client() as plain:
            told = plain.post("/tokenize", json={"messages": [message]}).json()
        assert told["count"] == counts[-1]
    assert counts[0] < counts[1] and counts[0] < counts[2]


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
REMOTE = {"type": "image_url", "image_url": "http://127.0.0.1/x.png"}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"messages": [{"role": "user", "content": [BROKEN]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [REMOTE]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "system", "content": [BROKEN]}]},
         "messages[0].content[0].image_url"),
        ({"response_format": {**JSON_SCHEMA, "strict": True}}, "response_format.strict"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_bad_input_names_its_field(
    client: openai.OpenAI, fields: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, fields.pop("messages", MESSAGES), **fields)
    assert refused.value.param == parameter
    assert ask(client, max_tokens=1).choices


def test_a_prompt_longer_than_the_device(
    service: LiveService, start_service: Any, tmp_path: Path
) -> None:
    prompt = [(7 * i) % 250 + 3 for i in range(900)]
    want = service.complete(prompt, model="k3", max_tokens=6).json()["choices"]
    limits = ("--kv-budget-bytes", "320KiB", "--context", "1024", "--chunk-tokens", "64")
    tiers = ("--tiers", f"host=256KiB,disk={tmp_path / 'tier'}:4MiB", "--max-sequences", "2")
    small = start_service(DATA / "checkpoint", *limits, *tiers).wait_ready()
    assert small.get("/startup").json()["facts"]["kv_tokens"] < len(prompt) // 2
    for _ in range(2):  # the second time it is found where it lies
        reply = small.complete(prompt, max_tokens=6).json()["choices"]
        assert reply[0]["token_ids"] == want[0]["token_ids"]
    moved = {key: value for key, value in small.metrics().items() if "tier_moved_bytes" in key}
    assert sum(value for key, value in moved.items() if "disk" in key and '"in"' in key) > 0
