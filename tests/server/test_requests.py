"""Tests of what a request may say: types, bounds, unknown fields, limits, and how refusals read."""

import json
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def refuse(server: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    return error


TOOLS: Any = [{"type": "function", "function": {"name": "find"}}]
TEXT = {"type": "text", "text": "what is this?"}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAAC"


def schema_format(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    return {"response_format": form}


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def said(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": MESSAGES, **fields}


def test_unknown_fields_are_all_named(server: Any) -> None:
    error = refuse(server, CHAT, chat(colour="red", temprature=1))
    assert "colour, temprature" in error["message"] and error["code"] == "unknown_field"
    error = refuse(server, CHAT, {"model": "small", "messages": [{**MESSAGES[0], "mood": 1}]})
    assert error["param"] == "messages[0].mood"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 10**6}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (schema_format({"type": "thing"}), "response_format"),
        (schema_format({"$ref": "#/nowhere"}), "response_format"),
        (schema_format({"type": "string", "pattern": "("}), "response_format"),
        ({**schema_format({"type": "object"}), "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": choose("other"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": choose("find"), "tools": TOOLS}, "tool_choice"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]"),
        (said([{"type": "image_url"}]), "messages[0].content[0].image_url"),
        (said([{"type": "audio"}]), "messages[0].content[0]"),
        (
            said([TEXT, {"type": "image_url", "image_url": {"url": PIXEL}}]),
            "messages[0].content[1]",
        ),
        (said([{"type": "image_url", "image_url": PIXEL}]), "messages[0].content[0]"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
)
def test_wrong_values_name_their_field(server: Any, fields: Any, parameter: str | None) -> None:
    error = refuse(server, CHAT, chat(**fields))
    assert parameter is None or error["param"] == parameter
    assert "$" not in error["message"] and "Traceback" not in error["message"]


def test_several_wrong_values_are_all_named(server: Any) -> None:
    message = refuse(server, CHAT, chat(temperature="x", top_p=7, seed=[]))["message"]
    assert all(name in message for name in ("temperature", "top_p", "seed"))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "[1]",
        '{"model": NaN}',
        '{"model": "small", "messages": [{"role":"user","content":"\\ud800"}]}',
        '{"model": "small", "prompt": ' + "[" * 100_000,
        '{"model": "small", "temperature": 1e999, "messages": [{"role":"user","content":"x"}]}',
        '{"model": "small", "metadata": {"x": -Infinity}}',
    ],
)
def test_text_that_is_no_good_json_is_refused(server: Any, text: str) -> None:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        answer = client.post(CHAT, content=text.encode(), headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], ["a", 1], [1.0], [True], {"a": 1}, None, [-1], [[1], "a"]]
)
def test_prompts_of_other_forms_are_refused(server: Any, prompt: Any) -> None:
    error = refuse(server, "/v1/completions", {"model": "small", "prompt": prompt})
    assert error["param"] == "prompt" and len(error["message"]) < 200


def test_refused_fields_say_why(server: Any) -> None:
    body = {"model": "small", "prompt": "x", "best_of": 2, "suffix": "y"}
    message = refuse(server, "/v1/completions", body)["message"]
    assert "ask for n choices" in message and "only forwards" in message


def test_prompt_outside_the_vocabulary_or_the_context(server: Any) -> None:
    error = refuse(server, "/v1/completions", {"model": "small", "prompt": [5, 10**8]})
    assert "100000000 is outside the vocabulary" in error["message"]
    error = refuse(server, "/v1/completions", {"model": "small", "prompt": [5] * 256})
    assert "256 tokens, the prompt has 256" in error["message"]
    assert error["code"] == "context_length_exceeded"


def test_max_tokens_left_out_is_the_rest_of_the_context(server: Any) -> None:
    body = {"model": "small", "prompt": [5] * 200, "ignore_eos": True, "return_token_ids": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert len(choice["token_ids"]) == 56 and choice["prompt_token_ids"] == [5] * 200
    assert choice["finish_reason"] == "length"


def test_harmless_fields_are_accepted(server: Any) -> None:
    body = chat(user="me", metadata={"a": [1, None]}, store=True, max_tokens=1, stop=None, n=None)
    assert server.post(CHAT, body).status_code == 200


def test_what_a_client_got_it_may_send_back(server: Any) -> None:
    said = {"role": "assistant", "content": None, "refusal": None, "audio": None}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]}
    messages = [*MESSAGES, {**said, "tool_calls": [call]}, tool]
    assert server.post(CHAT, chat(messages=messages, max_tokens=1)).status_code == 200


def test_tools_reach_the_template_unless_they_are_switched_off(server: Any) -> None:
    tools = [{"type": "function", "function": {"name": "find_weather"}}]

    def prompt(choice: str) -> str:
        server.post(CHAT, chat(tools=tools, tool_choice=choice, max_tokens=1))
        ids = server.engine.submitted[-1].prompt_ids
        return str(server.engine.tokenizer.decode(ids, skip_special=False))

    assert "find_weather" in prompt("auto") and "find_weather" not in prompt("none")


def test_control_tokens_in_a_message_stay_text(server: Any) -> None:
    body = chat(messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=1)
    assert server.post(CHAT, body).status_code == 200
    control = server.engine.tokenizer.specials["<|im_end|>"]
    assert server.engine.submitted[-1].prompt_ids.count(control) == 1  # the template's own


def test_parameters_reach_the_engine(server: Any) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": -5,
        "min_tokens": 2,
        "max_tokens": 4,
        "logit_bias": {"7": -100},
        "stop_token_ids": [9],
        "ignore_eos": True,
    }
    assert server.post(CHAT, chat(**given)).status_code == 200
    params = server.engine.submitted[-1].params
    expected = {
        **given,
        "top_k": 0,
        "logit_bias": {7: -100},
        "seed": -5 & (2**63 - 1),
        "end_token_ids": (9,),
    }
    del expected["stop_token_ids"], expected["ignore_eos"]
    assert {name: getattr(params, name) for name in expected} == expected


def test_cache_salt_and_key_reach_the_engine(server: Any) -> None:
    assert server.post(CHAT, chat(cache_salt="s", prompt_cache_key="k")).status_code == 200
    submitted = server.engine.submitted[-1]
    assert (submitted.salt, submitted.cache_hint) == ("s", "k")
    body = {"model": "small", "prompt": "hello", "max_tokens": 1, "cache_salt": "t"}
    assert server.post("/v1/completions", body).status_code == 200
    submitted = server.engine.submitted[-1]
    assert (submitted.salt, submitted.cache_hint) == ("t", "")
    assert refuse(server, CHAT, chat(cache_salt=""))["param"] == "cache_salt"


def test_priority_reaches_the_engine(server: Any) -> None:
    body = {"model": "small", "prompt": "hello", "max_tokens": 1, "priority": -3}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.engine.submitted[-1].priority == -3
    assert server.post(CHAT, chat()).status_code == 200
    assert server.engine.submitted[-1].priority == 0
    assert refuse(server, CHAT, chat(priority=0.5))["param"] == "priority"


def test_a_stop_token_is_not_part_of_the_text(server: Any) -> None:
    ids = server.engine.reply_ids
    body = chat(stop_token_ids=[ids[4]], return_token_ids=True, logprobs=True)
    answer = server.post(CHAT, body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == ids[:5]
    assert len(choice["logprobs"]["content"]) == 4
    assert choice["message"]["content"] == server.engine.tokenizer.decode(
        ids[:4], skip_special=True
    )
    assert answer["prompt_token_ids"] == server.engine.submitted[-1].prompt_ids


def test_tokenize_says_what_chat_would_send(server: Any) -> None:
    found = server.post("/tokenize", {"messages": MESSAGES}).json()
    server.post(CHAT, chat(max_tokens=1))
    assert found["tokens"] == server.engine.submitted[-1].prompt_ids
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 256
    refuse(server, "/tokenize", {"messages": MESSAGES, "text": "x"})


def test_tokenize_and_back(server: Any) -> None:
    text = "Caf\u00e9 \U0001f642<|im_end|>"
    ids = server.post("/tokenize", {"text": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["text"] == text
    skipped = {"tokens": ids, "skip_special_tokens": True}
    assert server.post("/detokenize", skipped).json()["text"] == "Caf\u00e9 \U0001f642"
    refuse(server, "/detokenize", {"tokens": [10**6]})


def test_body_over_the_limit_is_refused_declared_or_not(start_server: Any) -> None:
    server = start_server(limits={"max_body_bytes": 2000})
    big = json.dumps(chat(user="x" * 3000)).encode()
    headers = {"content-type": "application/json"}
    with server.client() as client:
        assert client.post(CHAT, content=big, headers=headers).status_code == 413
    with server.client() as client:
        answer = client.post(CHAT, content=iter([big[:1500], big[1500:]]), headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


def test_other_content_types_paths_and_methods(server: Any) -> None:
    with server.client() as client:
        answer = client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 415
        assert client.get("/nowhere").json()["error"]["code"] == "no_such_path"
        answer = client.get(CHAT)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
