"""Makes the smoke profile of k3-mini: held-out questions, their answers, and likelihoods of texts.

Usage: python scripts/record_k3_mini_samples.py http://127.0.0.1:8000 [--dtype bfloat16]
Asks a running k3-mini at float32. A question comes from held-out data and its answer from what is
true, never from the model; of each kind the first ones that the model gets right are kept, since a
smoke test asks whether a service runs the model as it is, and the card says how often it is right.
With --dtype, of a service that computes in that type, only what its likelihoods differ by is
measured and allowed; of services of several layouts, asked in turn, the largest difference counts.
Needs scikit-learn for the drawings. Writes beside firstlight.accept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

import firstlight.accept
from evaluate_k3_mini import is_right, requests_of
from firstlight.accept.bench_load import find_model
from firstlight.accept.known_texts import KNOWN_TEXTS
from firstlight.accept.smoke_likelihood import ask_likelihood, mean_difference
from firstlight.accept.smoke_service import Service
from firstlight.training.recipes.k3_mini import held_out, lookup
from firstlight.training.recipes.k3_mini.conversations import Conversation

FOLDER = Path(firstlight.accept.__file__).parent
PICTURES = FOLDER / "pictures"
NAME = "k3-mini"
FILE = FOLDER / f"samples_{NAME}.json"
LISTS = (64, 256, 512, 1024)
# Kinds of conversations with how many of each are kept, half of them without thinking.
KEPT: Mapping[str, int] = {
    "digit": 10,
    "colour": 6,
    "shape": 6,
    "place": 4,
    "count": 4,
    "reverse": 4,
    "tool": 2,
    **{f"lookup {tokens}": 2 for tokens in LISTS},
}
SHOWN = {"digit": 2, "colour": 1, "shape": 1, "count": 1, "tool": 1, "reverse": 1, "lookup 64": 1}
LONGEST_ANSWER = 64
# Sums in another order move 0.00003, the least important expert doubled moves 0.005 (float32).
TOLERANCE = 0.002
SPREAD_FACTOR = 2.0


def talks(task: str, *, thinking: bool) -> Iterator[Conversation]:
    """Held-out conversations of one kind, as many as may be looked at."""
    if task == "digit":
        yield from _each_digit(thinking=thinking)
    elif task.startswith("lookup"):
        yield from held_out.lists(int(task.split()[1]), 20, thinking=thinking)
    else:
        source = held_out.texts if task in ("reverse", "tool") else held_out.shapes
        yield from (talk for talk in source(20, thinking=thinking) if talk.task == task)


def _each_digit(*, thinking: bool) -> Iterator[Conversation]:
    """Drawings in an order that shows every digit early: 0 to 9, with thinking 5 to 9 first."""
    found: dict[str, list[Conversation]] = {}
    for talk in held_out.digits(thinking=thinking):
        found.setdefault(talk.messages[-1]["content"], []).append(talk)
    order = "5678901234" if thinking else "0123456789"
    for row in zip(*(found[digit] for digit in order), strict=False):
        yield from row


async def right_of(
    service: Service, talk: Conversation
) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] | None:
    """The requests of a conversation with wanted message and answer; None when one is wrong."""
    found = []
    for body, want in requests_of(talk, service.model):
        answer = await service.client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        whole = answer.json()
        if not is_right(whole["choices"][0]["message"], want):
            return None
        found.append((body, want, whole))
    return found


def sample_of(
    name: str, talk: Conversation, asked: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    """One sample; its images are written beside."""
    body, want, answer = asked
    content = body["messages"][0]["content"]
    images = []
    if not isinstance(content, str):
        for number, image in enumerate(talk.images):
            images.append(f"{name}{f'-{number}' if number else ''}.png")
            image.save(PICTURES / images[-1], "PNG", optimize=True)
        content = next(part["text"] for part in content if part["type"] == "text")
    calls = [call["function"] for call in want.get("tool_calls") or []]
    sample = {
        "name": name,
        "group": group_of(talk.task),
        "api": "chat",
        "prompt": content,
        "accept": [want.get("content") or ""],
        "match": "exact",
        "max_tokens": LONGEST_ANSWER,
        "finish_reason": "tool_calls" if calls else "stop",
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "must_stop": not calls,
        "reasoning": want.get("reasoning_content") or "",
        "calls": [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in calls],
    }
    optional = {
        "images": images,
        "after": body["messages"][1:],
        "tools": body.get("tools"),
        "effort": body.get("reasoning_effort"),
    }
    return {**sample, **{key: value for key, value in optional.items() if value}}


def group_of(task: str) -> str:
    """The group that samples of a kind are judged in."""
    if task in ("digit", "reverse", "tool"):
        return {"digit": "digits", "reverse": "small text", "tool": "tool"}[task]
    return "lookup" if task.startswith("lookup") else "shapes"


async def samples(service: Service) -> list[dict[str, Any]]:
    """All samples; says how many questions were passed over."""
    found: list[dict[str, Any]] = []
    for task, count in KEPT.items():
        shown = SHOWN.get(task, 0)
        for thinking in (True, False):
            kept = over = 0
            for talk in talks(task, thinking=thinking):
                if kept == count // 2:
                    break
                asked = await right_of(service, talk)
                if asked is None:
                    over += 1
                    continue
                kept += 1
                mode = "" if thinking else "-direct"
                for number, one in enumerate(asked):
                    name = f"{task.replace(' ', '-')}{mode}-{kept}{'-result' if number else ''}"
                    sample = sample_of(name, talk, one)
                    found.append(
                        {**sample, "shown": True} if thinking and kept <= shown else sample
                    )
            print(f"{task}, {'thinking' if thinking else 'direct'}: {kept} kept, {over} wrong")
            assert kept == count // 2, f"too few right answers to {task}"
    return found


def texts() -> dict[str, str]:
    """What likelihoods are recorded of: values in two orders, and what the model never learned."""
    draw = held_out.draw_of("likelihood", 0)
    pairs = [f"{name}={number}" for name, number in lookup.draw_pairs(draw, 32)]
    again = draw.sample(pairs, len(pairs))
    return {
        "lists": "\n".join([*pairs, "", *again]),
        "other text": "\n".join(KNOWN_TEXTS[name] for name in ("prose", "code", "digits")),
    }


async def profile(url: str) -> dict[str, Any]:
    """The whole profile as plain values."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        model = await find_model(client, "")
        service = Service(client, model, ("chat", "completions"))
        found = await samples(service)
        likelihoods = [
            {
                "name": name,
                "text": text,
                "logprobs": [round(p, 4) for p in await ask_likelihood(service, text)],
                "tolerances": {"float32": TOLERANCE},
            }
            for name, text in texts().items()
        ]
    groups = sorted({sample["group"] for sample in found})
    return {
        "name": NAME,
        "description": "held-out questions that the bundled k3-mini answers; exact, greedy",
        "demands": ["images", "reasoning", "tools"],
        "groups": [{"name": name, "need": 1.0} for name in groups],
        "samples": found,
        "likelihoods": likelihoods,
    }


async def with_tolerances(url: str, dtype: str) -> dict[str, Any]:
    """The recorded profile, in which likelihoods allow a type what this service differs by."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="ascii"))
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        service = Service(client, await find_model(client, ""), ("chat", "completions"))
        for one in content["likelihoods"]:
            found = await ask_likelihood(service, one["text"])
            differs = mean_difference(found, one["logprobs"])
            print(f"{one['name']}: off by {differs:.5f}")
            most = max(SPREAD_FACTOR * differs, one["tolerances"].get(dtype, 0.0))
            one["tolerances"][dtype] = round(most, 3)
    return content


def main() -> None:
    """Reads the command line, asks, and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"))
    given = parser.parse_args()
    url = given.url.removesuffix("/v1")
    if given.dtype:
        write(asyncio.run(with_tolerances(url, given.dtype)))
        return
    PICTURES.mkdir(exist_ok=True)
    for kind in KEPT:
        for old in PICTURES.glob(f"{kind}-*[0-9].png"):
            old.unlink()
    write(asyncio.run(profile(url)))


def write(content: dict[str, Any]) -> None:
    """Writes the profile."""
    text = msgspec.json.format(json.dumps(content), indent=1)
    FILE.write_text(text + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
