"""Owns what a soak asks: questions that come again and again, and requests no server should take.

Knows bodies of OpenAI's protocol and what answers them rightly; sends nothing.
"""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from firstlight.accept.samples import Sample, load_profile, picture_url

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PICTURES = ("any-digit-4.png", "any-red-circle.png", "colour-1.png")
PLAIN_IDS = 250
FAMILIES = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["round", "square"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}
SYSTEM = "You look up values in lists of pairs. Say the value and nothing else. " + " ".join(
    f"item{n}={(n * 37) % 1000}" for n in range(40)
)


class Question(NamedTuple):
    """A body without the fields that change no answer. `drawn` by a seed or greedy; `sample` knows
    the right answer."""

    number: int
    kind: str
    path: str
    fields: dict[str, Any]
    drawn: bool = False
    sample: Sample | None = None


class Bad(NamedTuple):
    """A request to be refused: what is sent, and the status that says so."""

    name: str
    path: str
    content: bytes
    status: int


def make_questions(model: str, context: int, number: int) -> list[Question]:
    """Returns so many questions, the same ones for the same arguments, in order of kinds."""
    draw = random.Random(7)
    texts = [[draw.randrange(PLAIN_IDS) for _ in range(context)] for _ in range(FAMILIES)]
    kinds = [_known, _prefix, _prefix, _prefix, _long, _chat, _chat, _choices, _json, _tool]
    kinds += [_scores, _picture]
    found = []
    for index in range(number):
        kind = kinds[index % len(kinds)]
        question = kind(draw, texts, index)
        fields = {"model": model, "return_token_ids": True, **question.fields}
        found.append(question._replace(fields=fields))
    return found


def _known(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    samples = [s for s in load_profile("k3-mini").samples if s.match == "exact"]
    sample = draw.choice(samples)
    path = CHAT if sample.api == "chat" else COMPLETIONS
    fields = {"temperature": 0, "max_tokens": sample.max_tokens or 64, **sample.options}
    if sample.api != "chat":
        fields["prompt"] = sample.prompt
    return Question(index, "known answer", path, fields, sample=sample)


def _prefix(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    prompt = draw.choice(texts)[: draw.choice([20, 90, 300, 700])]
    prompt = prompt + [draw.randrange(PLAIN_IDS) for _ in range(draw.choice([0, 1, 7]))]
    drawn = draw.random() < 0.3
    fields = {
        "prompt": prompt,
        "max_tokens": draw.choice([1, 8, 24, 60]),
        "temperature": 1.0 if drawn else 0,
        "seed": index,
        "ignore_eos": True,
        "logprobs": 1,
    }
    return Question(index, "shared prefix", COMPLETIONS, fields, drawn)


def _long(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    text = draw.choice(texts)
    prompt = text[: int(len(text) * draw.uniform(0.6, 0.9))]
    fields = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return Question(index, "longer than the device", COMPLETIONS, fields)


def _chat(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    messages = [{"role": "system", "content": SYSTEM}]
    for _ in range(draw.choice([0, 1, 2])):
        item = draw.randrange(40)
        messages.append({"role": "user", "content": f'What is "item{item}"?'})
        messages.append({"role": "assistant", "content": str(item * 37 % 1000)})
    messages.append({"role": "user", "content": f'What is "item{draw.randrange(40)}"?'})
    fields = {
        "messages": messages,
        "max_tokens": 40,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": draw.random() < 0.5},
    }
    return Question(index, "conversation", CHAT, fields)


def _choices(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    fields = {
        "prompt": draw.choice(texts)[:150],
        "max_tokens": 30,
        "n": 3,
        "temperature": 1.0,
        "seed": index,
        "ignore_eos": True,
    }
    return Question(index, "three choices", COMPLETIONS, fields, drawn=True)


def _json(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    fields = {
        "messages": [{"role": "user", "content": f"Thing {draw.randrange(9)}?"}],
        "max_tokens": 60,
        "temperature": 0,
        "response_format": FORMAT,
        "chat_template_kwargs": {"thinking": False},
    }
    return Question(index, "held to a schema", CHAT, fields)


def _tool(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    fields = {
        "messages": [{"role": "user", "content": f"Draw thing {draw.randrange(9)}."}],
        "max_tokens": 120,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "draw"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"thinking": False},
    }
    return Question(index, "held to a call", CHAT, fields)


def _scores(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    prompt = draw.choice(texts)[: draw.choice([30, 200])]
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    return Question(index, "scores of the prompt", COMPLETIONS, fields | {"ignore_eos": True})


def _picture(draw: random.Random, texts: list[list[int]], index: int) -> Question:
    names = [draw.choice(PICTURES) for _ in range(draw.choice([1, 1, 2]))]
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture_url(name)}} for name in names
    ]
    parts.append({"type": "text", "text": "Which colour is it?"})
    messages = [{"role": "user", "content": parts}]
    fields = {"messages": messages, "max_tokens": 40, "temperature": 0}
    return Question(index, "pictures", CHAT, fields)


def make_bad(model: str, context: int) -> list[Bad]:
    """Returns requests of which each is wrong in one way."""
    user = [{"role": "user", "content": "hello"}]
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    chats: dict[str, dict[str, Any]] = {
        "unknown field": {"messages": user, "nonsense": 1},
        "no message": {"messages": []},
        "wrong type": {"messages": user, "max_tokens": "many"},
        "infinite temperature": {"messages": user, "temperature": 1e308},
        "broken picture": {"messages": [{"role": "user", "content": [broken]}]},
        "schema that cannot be held": {
            "messages": user,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "if": {"const": 1}}},
            },
        },
        "call of no tool": {"messages": user, "tool_choice": "required"},
    }
    completions: dict[str, dict[str, Any]] = {
        "empty prompt": {"prompt": []},
        "token that is none": {"prompt": [10**7], "max_tokens": 1},
        "longer than the context": {"prompt": [5] * (context + 1), "max_tokens": 1},
        "too many choices": {"prompt": "a", "n": 10**6},
        "no tokens": {"prompt": "a", "max_tokens": 0},
        "half a priority": {"prompt": "a", "priority": 0.5},
    }
    found = [_refused(name, CHAT, {"model": model, **body}) for name, body in chats.items()]
    found += [
        _refused(name, COMPLETIONS, {"model": model, **body}) for name, body in completions.items()
    ]
    return [
        *found,
        Bad("no JSON", CHAT, b'{"model": ', 400),
        Bad("another model", COMPLETIONS, b'{"model": "none", "prompt": "a"}', 404),
        Bad("no such path", "/v1/nothing", b"{}", 404),
    ]


def _refused(name: str, path: str, body: dict[str, Any]) -> Bad:
    return Bad(name, path, json.dumps(body).encode(), 400)
