"""Answers of a model with markup of its own, through OpenAI's client: a scripted engine says what
Kimi K3 would, and reasoning, content and calls arrive apart, whole and streamed alike."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from firstlight.inputs.chat_format import load_chat_format
from firstlight.inputs.generation_defaults import read_generation_defaults
from firstlight.inputs.tokenizer import load_tokenizer
from openai_clients import openai_client

DATA = Path(__file__).parent.parent / "data" / "k3"
CASES = {case["name"]: case for case in json.loads((DATA / "render/parse.json").read_text())}
MESSAGES: Any = [{"role": "user", "content": "Go on."}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "get_weather", "calc", "ping")
]
THOUGHT = "Let me see.<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>response<|sep|><|close|>message<|sep|>"


@pytest.fixture(scope="module")
def k3(make_server: Any) -> Iterator[Any]:
    folder = DATA / "checkpoint"
    tokenizer = load_tokenizer(folder)
    server = make_server(
        tokenizer=tokenizer,
        chat_format=load_chat_format(folder, tokenizer),
        defaults=read_generation_defaults(folder),
        context_length=4096,
    )
    server.start()
    yield server
    server.ask_to_end()
    assert server.join() == 0


@pytest.fixture
def client(k3: Any) -> Iterator[openai.OpenAI]:
    with openai_client(k3.url) as one:
        yield one


def say(k3: Any, text: str) -> None:
    k3.engine.reply_ids = k3.context.tokenizer.encode(text, add_special=False)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="small", messages=MESSAGES, temperature=0, **fields)


def joined(chunks: list[Any]) -> tuple[str, str, list[Any], str | None]:
    """What a stream says: reasoning, content, calls, and why it ended."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    return reasoning, content, calls, chunks[-1].choices[0].finish_reason


def wanted(case: Any) -> Any:
    """What an answer must be; some public parsers differ, then the recommended one counts."""
    if "expected" in case:
        return case["expected"]
    name = "sglang_whole" if case["recommended"] == "any" else case["recommended"]
    return case["results"][name]


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_answer_is_told_apart(client: openai.OpenAI, k3: Any, name: str) -> None:
    case = CASES[name]
    k3.engine.reply_ids = case["token_ids"]
    options: dict[str, Any] = {
        "extra_body": {"chat_template_kwargs": {"thinking": case["thinking"]}}
    }
    if case["tools_in_request"]:
        options |= {"tools": TOOLS, "tool_choice": case["tool_choice"]}
    choice = ask(client, **options).choices[0]
    want = wanted(case)
    calls = choice.message.tool_calls or []
    assert (getattr(choice.message, "reasoning_content", None) or None) == want["reasoning"]
    assert (choice.message.content or None) == want["content"]
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert found == [(call["name"], call["arguments"]) for call in want["tool_calls"]]
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert (choice.message.content is None) == (bool(calls) and not want["content"])

    reasoning, content, streamed, finish = joined(list(ask(client, stream=True, **options)))
    assert (content or None) == want["content"] and finish == choice.finish_reason
    if name != "skipped_think_channel":  # there a stream cannot take back what it called reasoning
        assert (reasoning or None) == want["reasoning"]
    same = [(call.function.name, call.function.arguments) for call in streamed]
    assert same == [(call.function.name, call.function.arguments) for call in calls]
    assert [call.index for call in streamed] == list(range(len(calls)))
    assert all(call.type == "function" and call.id for call in [*calls, *streamed])
    assert len({call.id for call in [*calls, *streamed]}) == len([*calls, *streamed])


def test_reasoning_tokens_are_counted(client: openai.OpenAI, k3: Any) -> None:
    say(k3, THOUGHT + "Yes." + END)
    usage = ask(client).usage
    thought = k3.context.tokenizer.encode("Let me see.<|close|>think<|sep|>", add_special=False)
    assert usage.completion_tokens_details.reasoning_tokens == len(thought)
    assert usage.completion_tokens == len(k3.engine.reply_ids) + 1
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len(thought)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_may_run_out_inside_the_reasoning(
    client: openai.OpenAI, k3: Any, stream: bool
) -> None:
    say(k3, THOUGHT + "Yes." + END)
    answer = ask(client, max_tokens=4, stream=stream)
    if stream:
        reasoning, content, calls, finish = joined(list(answer))
        assert (content, calls, finish) == ("", [], "length")
    else:
        choice = answer.choices[0]
        reasoning = choice.message.reasoning_content
        assert choice.finish_reason == "length" and not choice.message.content
        assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert reasoning and "Let me see.".startswith(reasoning)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_in_the_content_only(
    client: openai.OpenAI, k3: Any, stream: bool
) -> None:
    say(k3, THOUGHT + "One two see. Three." + END)
    answer = ask(client, stop=["see."], stream=stream)
    if stream:
        reasoning, content, _, finish = joined(list(answer))
    else:
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        reasoning, content = message.reasoning_content, message.content
    assert (reasoning, content, finish) == ("Let me see.", "One two ", "stop")
    k3.engine.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_contents_tokens(
    client: openai.OpenAI, k3: Any, stream: bool
) -> None:
    text = "Caf\u00e9 \u6f22\u5b57 \U0001f642 ok"
    say(k3, THOUGHT + text + END)
    answer = ask(client, logprobs=True, top_logprobs=1, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    tokens = [token for c in choices if c.logprobs for token in c.logprobs.content]
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == text
    assert len(tokens) == len(k3.context.tokenizer.encode_plain(text))


def test_all_token_ids_come_back(client: openai.OpenAI, k3: Any) -> None:
    k3.engine.reply_ids = CASES["parallel_calls_with_text"]["token_ids"]
    options = {"tools": TOOLS, "extra_body": {"return_token_ids": True}}
    whole = ask(client, **options)
    ids = whole.choices[0].token_ids
    assert ids[:-1] == k3.engine.reply_ids
    chunks = list(ask(client, stream=True, **options))
    assert [i for c in chunks for i in getattr(c.choices[0], "token_ids", None) or []] == ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


def test_several_choices_have_calls_of_their_own(client: openai.OpenAI, k3: Any) -> None:
    k3.engine.reply_ids = CASES["parallel_calls_with_text"]["token_ids"]
    answer = ask(client, n=3, tools=TOOLS)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls]
    assert len(calls) == 6 and len({call.id for call in calls}) == 6
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in ask(client, n=3, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += [call.index for call in choice.delta.tool_calls or []]
    assert streamed == {0: [0, 1], 1: [0, 1], 2: [0, 1]}


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_is_given_where_several_are_not_wanted(
    client: openai.OpenAI, k3: Any, stream: bool
) -> None:
    k3.engine.reply_ids = CASES["parallel_calls_with_text"]["token_ids"]
    answer = ask(client, tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        _, content, calls, finish = joined(list(answer))
    else:
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        content, calls = message.content, message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]
    assert (content, finish) == ("Checking.", "tool_calls")


def test_what_an_answer_held_may_be_sent_back(client: openai.OpenAI, k3: Any) -> None:
    k3.engine.reply_ids = CASES["one_call_all_types"]["token_ids"]
    message = ask(client, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    back: Any = [*MESSAGES, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="small", messages=back, tools=TOOLS, max_tokens=1)
    prompt = k3.context.tokenizer.decode(k3.engine.submitted[-1].prompt_ids, skip_special=False)
    assert "use it<|close|>think<|sep|>" in prompt and '<|open|>call tool="f" index="1"' in prompt
    assert '<|open|>message role="tool" tool="f" index="1"<|sep|>42' in prompt
    other: Any = [*MESSAGES, {"role": "assistant", "content": "x", "reasoning": "thus"}, *MESSAGES]
    client.chat.completions.create(model="small", messages=other, max_tokens=1)
    prompt = k3.context.tokenizer.decode(k3.engine.submitted[-1].prompt_ids, skip_special=False)
    assert "think<|sep|>thus<|close|>think" in prompt


def test_the_request_shapes_the_prompt(client: openai.OpenAI, k3: Any) -> None:
    def prompt(**fields: Any) -> str:
        ask(client, max_tokens=1, **fields)
        ids = k3.engine.submitted[-1].prompt_ids
        return str(k3.context.tokenizer.decode(ids, skip_special=False))

    assert prompt().endswith("<|open|>think<|sep|>")
    assert prompt(reasoning_effort="none").endswith("<|open|>response<|sep|>")
    off = {"chat_template_kwargs": {"thinking": False}}
    assert prompt(extra_body=off).endswith("<|open|>response<|sep|>")
    assert "thinking_effort=low" in prompt(reasoning_effort="low")
    assert "MUST NOT call" in prompt(tools=TOOLS, tool_choice="none")
    assert "get_weather" in prompt(tools=TOOLS, tool_choice="none")
    assert "MUST call" in prompt(tools=TOOLS, tool_choice="required")
    assert "response_format=json_object" in prompt(response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("fields", "is_held"),
    [
        ({}, False),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
def test_a_grammar_goes_with_what_must_hold(
    client: openai.OpenAI, k3: Any, fields: Any, is_held: bool
) -> None:
    ask(client, max_tokens=1, **fields)
    assert bool(k3.engine.submitted[-1].params.grammar) is is_held


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": "yes"}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"thinkin": False}}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[4].function.name"),
    ],
)
def test_what_the_model_cannot_do_names_its_field(
    client: openai.OpenAI, fields: Any, parameter: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.param == parameter
