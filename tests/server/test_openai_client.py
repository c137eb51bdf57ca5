"""Tests with OpenAI's own client: what it parses is what was meant, streamed or whole."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted_engine import REPLY

from openai_clients import async_openai_client, openai_client

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai_client(server.url) as one:
        yield one


def test_a_whole_chat_answer(client: openai.OpenAI, server: Any) -> None:
    answer = client.chat.completions.create(model="small", messages=MESSAGES)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == REPLY
    assert choice.finish_reason == "stop" and choice.logprobs is None
    sent = server.engine.submitted[-1]
    assert answer.usage is not None and answer.usage.prompt_tokens == len(sent.prompt_ids)
    assert answer.usage.completion_tokens == len(server.engine.reply_ids) + 1  # and the end token
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert sent.params.top_k == 9 and sent.params.temperature == 0  # the model's own defaults


def test_the_prompt_is_the_rendered_template(client: openai.OpenAI, server: Any) -> None:
    client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=1)
    text = server.engine.tokenizer.decode(
        server.engine.submitted[-1].prompt_ids, skip_special=False
    )
    assert text == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_streamed_answer_equals_the_whole(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="small", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == REPLY
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_async_client_streams(server: Any) -> None:
    async with async_openai_client(server.url) as client:
        stream = await client.chat.completions.create(
            model="alias", messages=MESSAGES, stream=True, max_completion_tokens=5
        )
        finishes = [chunk.choices[0].finish_reason async for chunk in stream]
    assert finishes[-1] == "length" and set(finishes[:-1]) == {None}


def test_n_choices_differ_and_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="small", messages=MESSAGES, n=4, seed=3, temperature=1, max_tokens=8
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1 and first == ask()


def test_streamed_n_choices_each_have_a_role_and_an_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="small", messages=MESSAGES, n=3, stream=True)
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in stream:
        seen[chunk.choices[0].index].append(chunk.choices[0])
    for choices in seen.values():
        assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "stop"
        assert "".join(choice.delta.content or "" for choice in choices) == REPLY


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_request(
    client: openai.OpenAI, server: Any, stream: bool
) -> None:
    cancelled = server.engine.num_cancelled
    answer: Any = client.chat.completions.create(
        model="small", messages=MESSAGES, stop=["ran", "Paris. C"], stream=stream
    )
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("The capital of F", "stop")
    server.engine.wait_until_idle()
    assert server.engine.num_cancelled == cancelled + 1


def test_logprobs_join_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert raw.decode() == choice.message.content == REPLY
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [3] * len(
        choice.logprobs.content
    )
    assert choice.logprobs.content[0].top_logprobs[2].logprob == -9999.0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_end_where_a_stop_string_cuts(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model="small", messages=MESSAGES, logprobs=True, stop="is Paris", stream=stream
    )
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        tokens = [t for c in choices if c.logprobs for t in c.logprobs.content]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        tokens = answer.choices[0].logprobs.content
        text = answer.choices[0].message.content
    raw = b"".join(bytes(token.bytes) for token in tokens).decode()
    assert text == "The capital of France "
    assert raw.startswith(text) and not raw.removesuffix(tokens[-1].token).startswith(text)


def test_text_completion_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt=["one", "two"], n=2, max_tokens=3, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt="hello world", echo=True, logprobs=2, max_tokens=2
    )
    choice = answer.choices[0]
    lists = choice.logprobs
    assert lists is not None and lists.tokens and lists.token_logprobs and lists.text_offset
    assert lists.token_logprobs[0] is None and lists.token_logprobs[1] == -0.25
    assert "".join(lists.tokens) == choice.text
    for token, offset in zip(lists.tokens, lists.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_max_tokens_zero_only_scores(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt="hello world", echo=True, logprobs=0, max_tokens=0
    )
    choice = answer.choices[0]
    assert choice.text == "hello world" and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == "hello world"
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_streamed_completion_with_echo_equals_the_whole(client: openai.OpenAI) -> None:
    options: Any = {"model": "small", "prompt": [1, 2, 70, 71], "echo": True, "logprobs": 1}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    found = [chunk.choices[0].logprobs for chunk in chunks]
    offsets = [offset for lists in found if lists for offset in lists.text_offset or []]
    assert whole.choices[0].logprobs is not None
    assert offsets == whole.choices[0].logprobs.text_offset


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="256 tokens, the prompt has"):
        client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=250)
