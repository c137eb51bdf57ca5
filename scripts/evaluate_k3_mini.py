"""Judges a running k3-mini by what it answers: held-out questions, greedy, through its service.

Usage: python scripts/evaluate_k3_mini.py http://127.0.0.1:8000 [--count 100] [--lists 256 1024]
           [--list-count 100] [--digits 397] [--at-once 8] [--json]
Needs scikit-learn for the drawings. Prints shares of right answers by task, with and without
thinking, as a table and with --json as one line.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import httpx

from firstlight.training.recipes.k3_mini import held_out
from firstlight.training.recipes.k3_mini.conversations import Conversation

MAX_TOKENS = 64
PATIENCE = 3600.0  # seconds an answer may take: lists of 65,536 tokens wait for each other


class Questions(NamedTuple):
    """How much is asked: drawings of digits, questions of each other kind, sizes of lists and how
    many lists of each; `at_once` requests at the same time.
    """

    digits: int
    count: int
    lists: Sequence[int]
    list_count: int
    at_once: int


def conversations(asked: Questions, *, thinking: bool) -> Iterator[Conversation]:
    """Everything k3-mini is asked, in one mode."""
    count = asked.count
    yield from islice(held_out.digits(thinking=thinking), asked.digits)
    yield from held_out.shapes(count, thinking=thinking)
    yield from held_out.texts(count, thinking=thinking)
    for tokens in asked.lists:
        yield from held_out.lists(tokens, asked.list_count, thinking=thinking)


def requests_of(talk: Conversation, model: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields each request of a conversation with the message that should come back."""
    for number, message in enumerate(talk.messages):
        if message["role"] != "assistant":
            continue
        body: dict[str, Any] = {
            "model": model,
            "messages": [*with_images(talk, number)],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if not talk.thinking:
            body["reasoning_effort"] = "none"
        if talk.tools:
            body["tools"] = list(talk.tools)
        yield body, dict(message)


def with_images(talk: Conversation, number: int) -> Iterator[dict[str, Any]]:
    """The messages before one, with images as data URLs."""
    images = iter(talk.images)
    for message in talk.messages[:number]:
        parts = message["content"]
        if not isinstance(parts, str):
            parts = [
                {"type": "image_url", "image_url": {"url": data_url(next(images))}}
                if part["type"] == "image"
                else part
                for part in parts
            ]
        yield {**message, "content": parts}


def data_url(image: Any) -> str:
    """A picture as PNG in a URL."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def is_right(found: dict[str, Any], want: dict[str, Any]) -> bool:
    """Whether text, thought and calls are what they should be."""

    def told(message: dict[str, Any]) -> tuple[Any, ...]:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return (
            message.get("content") or "",
            message.get("reasoning_content") or message.get("reasoning") or "",
            [(call["name"], json.loads(call["arguments"])) for call in calls],
        )

    return told(found) == told(want)


async def judge(client: httpx.AsyncClient, model: str, talk: Conversation) -> bool:
    """Asks all requests of a conversation; right when every answer is."""
    for body, want in requests_of(talk, model):
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        if not is_right(answer.json()["choices"][0]["message"], want):
            return False
    return True


async def evaluate(url: str, asked: Questions) -> dict[str, dict[str, Any]]:
    """Returns for each task and mode how many were right of how many."""
    totals: dict[str, dict[str, Any]] = {}
    gate = asyncio.Semaphore(asked.at_once)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(name: str, talk: Conversation) -> None:
            async with gate:
                right = await judge(client, model, talk)
            entry = totals.setdefault(name, {"right": 0, "asked": 0})
            entry["right"] += right
            entry["asked"] += 1

        jobs = []
        for thinking in (True, False):
            mode = "thinking" if thinking else "direct"
            for talk in conversations(asked, thinking=thinking):
                jobs.append(one(f"{talk.task}, {mode}", talk))
        await asyncio.gather(*jobs)
    return totals


def main() -> None:
    """Reads the command line, asks, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--digits", type=int, default=397, help="drawings of digits")
    parser.add_argument("--lists", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--list-count", type=int, help="lists of each size; else --count")
    parser.add_argument("--at-once", type=int, default=8, help="requests at the same time")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lists = given.count if given.list_count is None else given.list_count
    asked = Questions(given.digits, given.count, given.lists, lists, given.at_once)
    totals = asyncio.run(evaluate(given.url.removesuffix("/v1"), asked))
    if given.json:
        print(json.dumps(totals, sort_keys=True))
        return
    for name, entry in sorted(totals.items()):
        share = entry["right"] / entry["asked"]
        print(f"{name:<24} {entry['right']:>5} of {entry['asked']:<5} {100 * share:6.1f} %")


if __name__ == "__main__":
    main()
