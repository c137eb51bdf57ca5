"""OpenAI's own clients, sync and async, against a real service on two ranks."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from openai_clients import async_openai_client, openai_client

MESSAGES: Any = [{"role": "user", "content": "the ship came into the harbour"}]
OURS: Any = {"ignore_eos": True}


@pytest.fixture
def client(shared_service: Any) -> Iterator[openai.OpenAI]:
    with openai_client(shared_service.url) as one:
        yield one


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    basis: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**{**basis, "extra_body": OURS, **fields})


def test_n_choices_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = ask(client, n=4, temperature=1, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 4 and texts() == first
    alone = ask(client, temperature=1, seed=7).choices[0].message.content
    assert alone == first[0]


def test_streamed_choices_equal_the_whole_ones(client: openai.OpenAI) -> None:
    whole = ask(client, n=3, temperature=1, seed=3)
    parts: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in ask(client, n=3, temperature=1, seed=3, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert parts == {choice.index: choice.message.content for choice in whole.choices}


def test_logprobs_are_a_distribution_and_greedy_takes_its_top(client: openai.OpenAI) -> None:
    content = ask(client, logprobs=True, top_logprobs=5).choices[0].logprobs.content
    assert len(content) == 12
    for token in content:
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 5
        assert token.logprob == values[0] and token.token == token.top_logprobs[0].token
        assert 0 < sum(math.exp(value) for value in values) <= 1 + 1e-6


def test_a_stop_string_cuts_text_and_work(client: openai.OpenAI, shared_service: Any) -> None:
    text = ask(client).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = ask(client, stop=stop, max_tokens=4000).choices[0]
    assert cut.finish_reason == "stop" and cut.message.content == text[: text.index(stop)]
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in ask(client, stop=stop, max_tokens=4000, stream=True)
    )
    assert streamed == cut.message.content
    shared_service.wait_for(
        lambda: shared_service.metrics()["running_requests"] == 0, 5, "idle after the stop"
    )


def test_echo_scores_a_prompt_as_its_continuation_was_scored(client: openai.OpenAI) -> None:
    """Log-probabilities of an answer, and of the same text read as a prompt, are equal."""
    options: Any = {"model": "tiny", "temperature": 0, "logprobs": 1, "extra_body": OURS}
    prompt = [5, 6, 7, 8, 9, 10]
    body: Any = {**OURS, "return_token_ids": True}
    written = client.completions.create(
        **{**options, "extra_body": body}, prompt=prompt, max_tokens=20
    ).choices[0]
    ids: Any = written.model_extra["token_ids"]  # type: ignore[index]
    read = client.completions.create(
        **options, prompt=[*prompt, *ids], max_tokens=0, echo=True
    ).choices[0]
    assert written.logprobs is not None and read.logprobs is not None
    assert read.logprobs.token_logprobs[0] is None
    assert read.logprobs.token_logprobs[len(prompt) :] == pytest.approx(
        written.logprobs.token_logprobs, abs=2e-5
    )


async def test_the_async_client_at_many_places_at_once(
    client: openai.OpenAI, shared_service: Any
) -> None:
    async with async_openai_client(shared_service.url) as many:

        async def text(seed: int) -> str:
            stream = await many.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                temperature=1,
                seed=seed,
                max_tokens=12,
                stream=True,
                extra_body=OURS,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        found = await asyncio.gather(*(text(seed) for seed in range(12)))
    for seed in (0, 5, 11):
        assert ask(client, temperature=1, seed=seed).choices[0].message.content == found[seed]


SCHEMA = {
    "type": "object",
    "properties": {"port": {"enum": ["east", "west"]}, "ships": {"type": "integer", "maximum": 9}},
    "required": ["port", "ships"],
    "additionalProperties": False,
}


def test_random_weights_answer_in_json_of_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "harbour", "schema": SCHEMA}}
    options: Any = {"response_format": form, "max_tokens": 200, "temperature": 1, "extra_body": {}}
    texts = {ask(client, seed=seed, **options).choices[0].message.content for seed in range(3)}
    for text in texts:
        found = json.loads(text)
        assert list(found) == ["port", "ships"] and found["port"] in ("east", "west")
        assert isinstance(found["ships"], int) and found["ships"] <= 9
    chunks = list(ask(client, seed=0, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in texts


def test_a_schema_that_is_none_is_refused_and_the_service_goes_on(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "ship"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format=form, extra_body={})
    assert refused.value.param == "response_format"
    assert ask(client).choices[0].message.content
