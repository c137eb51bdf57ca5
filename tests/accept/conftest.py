"""Owns a small OpenAI-compatible service over a rule-based model, and the ways to break it.

The model copies, counts, adds and knows a few facts, so the checks are held against a service that
deserves to pass; each fault is one a real service has shown.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from firstlight.accept.samples import picture_url

MODEL = "rules-1"
FACTS = {
    "capital of france": "Paris",
    "capital of japan": "Tokyo",
    "days are in a week": "7",
    "opposite of hot": "cold",
    "planet do we live": "Earth",
    "symbol for water": "H2O",
}
PICTURES = {
    picture_url(f"{name}.png"): name
    for name in (
        "any-red-circle",
        "any-blue-square",
        "any-green-triangle",
        "any-digit-4",
        "any-digit-7",
    )
}
WORDS = (
    "sea",
    "wind",
    "stone",
    "light",
    "river",
    "cloud",
    "grass",
    "amber",
    "north",
    "sail",
    "tide",
)


@dataclass
class Faults:
    """Which faults a service has; names as in the tests."""

    names: frozenset[str] = frozenset()
    active: int = 0
    was_left: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.names


def think(prompt: str, chat: bool) -> str:
    """The answer of the model: facts, sums, copies, counting, else a text all its own."""
    lowered = prompt.lower()
    if found := re.search(r"repeat exactly: (.+)", prompt, re.IGNORECASE):
        return found[1]
    if found := re.search(r"(\d+) ([-+*]) (\d+)\?", prompt):
        a, b = int(found[1]), int(found[3])
        return str({"+": a + b, "-": a - b, "*": a * b}[found[2]])
    if found := re.search(r"count from (\d+) to (\d+)", lowered):
        return ", ".join(str(n) for n in range(int(found[1]), int(found[2]) + 1))
    if found := re.search(r"(\d+),$", prompt):
        return "".join(f" {n}," for n in range(int(found[1]) + 1, 200))
    for key, fact in FACTS.items():
        if key in lowered:
            return fact if chat else f" {fact}." + ramble(prompt)
    for length in range(min(40, len(prompt) - 1), 4, -1):
        if (start := prompt.find(prompt[-length:], 0, -1)) >= 0:
            return prompt[start + length :] + ramble(prompt)
    return ramble(prompt)[: 90 if chat else None].strip()


def ramble(prompt: str) -> str:
    """A text without end in sight that depends on every character of the prompt."""
    seed, words = zlib.crc32(prompt.encode()), []
    for _ in range(300):
        seed = (seed * 1103515245 + 12345) % 2**31
        words.append(WORDS[(seed >> 16) % len(WORDS)])
    return " " + " ".join(words)


def tokens_of(text: str) -> list[str]:
    """Words with the space before them, cut further at six characters."""
    return re.findall(r"\s*\S{1,6}|\s+$", text)


class Broken(Exception):
    """A request that the service refuses."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def look(content: list[dict[str, Any]], faults: Faults) -> str:
    """The answer to a question about pictures: each bundled one is known by its bytes and name."""
    text = next(part["text"] for part in content if part["type"] == "text").lower()
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    names = [PICTURES[url] for url in urls]
    if "sees nothing" in faults:
        names = ["any-red-circle"] * len(names)
    if "first or the second" in text:
        return "first" if "circle" in names[0] else "second"
    *_, first, second = names[0].split("-")
    return second if "digit" in text or "shape:" in text or "which shape" in text else first


def validate(body: Any, chat: bool, faults: Faults) -> None:
    if not isinstance(body, dict):
        raise Broken(400, "the body is no object")
    if body.get("model") != MODEL and "any model" not in faults:
        raise Broken(404, f"no model {body.get('model')}")
    prompt = body.get("messages" if chat else "prompt")
    right = isinstance(prompt, list) and prompt if chat else isinstance(prompt, (str, list))
    if not right:
        raise Broken(500 if "crashes on bad input" in faults else 422, "bad prompt")
    if chat and "sees" not in faults.names and "image_url" in json.dumps(prompt):
        raise Broken(500 if "crashes on images" in faults else 400, "text only")
    if not isinstance(body.get("max_tokens", 1), int) or body.get("max_tokens", 1) < 1:
        raise Broken(400, "bad max_tokens")
    if not isinstance(body.get("temperature", 1), (int, float)):
        raise Broken(400, "bad temperature")
    for name in ("ignore_eos", "stream_options"):
        if name in body and f"no {name}" in faults:
            raise Broken(400, f"unknown field {name}")
    if isinstance(prompt, list) and not chat and "no token ids" in faults:
        raise Broken(400, "text only")


def prompt_text(body: dict[str, Any], chat: bool) -> str:
    if chat:
        content = body["messages"][-1]["content"]
        if isinstance(content, list):
            content = next(part["text"] for part in content if part["type"] == "text")
        return str(content)
    prompt = body["prompt"]
    return prompt if isinstance(prompt, str) else " ".join(f"w{i}" for i in prompt)


def answer_tokens(body: dict[str, Any], chat: bool, faults: Faults) -> tuple[list[str], str]:
    """The tokens of the answer and the finish reason."""
    prompt = prompt_text(body, chat)
    content = body["messages"][-1]["content"] if chat else ""
    thought = look(content, faults) if isinstance(content, list) else think(prompt, chat)
    text = broken_text(thought, prompt, chat, faults)
    if "requests mix" in faults and faults.active > 1:
        text = ramble(f"{faults.active}")
    if "breaks on disconnect" in faults and faults.was_left:
        text = "lost"
    if body.get("ignore_eos"):
        text += ramble(prompt)
    limit = body.get("max_tokens", 64) + (3 if "long answers" in faults else 0)
    tokens = tokens_of(text)
    reason = "length" if len(tokens) > limit else "stop"
    tokens = tokens[:limit]
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    if "no stop" not in faults:
        for stop in stops:
            whole = "".join(tokens)
            if stop in whole:
                tokens, reason = tokens_of(whole[: whole.index(stop)]), "stop"
    if "wrong finish reason" in faults:
        reason = "stop"
    return tokens, reason


def broken_text(text: str, prompt: str, chat: bool, faults: Faults) -> str:
    if "constant" in faults:
        return "I am a model."
    if "loops" in faults:
        return "!" * 400
    if "echo" in faults:
        return prompt + text
    if "blind" in faults:
        return ramble(str(len(faults.requests) % 7)).strip()[:80]
    if "leaks control strings" in faults and chat:
        return text + "<|im_end|>\n<|im_start|>user\nAnd now?"
    if "leaks instructions" in faults and chat:
        return "[INST] " + text
    if "leaks roles" in faults and chat:
        return text + "\nuser\nAnd now?\nassistant\n" + text
    if "never stops" in faults and chat:
        return text + ramble(prompt) * 2
    if "mangles UTF-8" in faults:
        return text.encode().decode("latin-1")
    return text


def logprobs(tokens: list[str], chat: bool, faults: Faults) -> dict[str, Any]:
    best = math.log(0.7)
    if "bad logprobs" in faults:
        best = 0.5
    other = {"x": math.log(0.2), "y": math.log(0.05)}
    if chat:
        top = [{"token": k, "logprob": v} for k, v in other.items()]
        rows = [
            {"token": t, "logprob": best, "top_logprobs": [{"token": t, "logprob": best}, *top]}
            for t in tokens
        ]
        return {"content": rows}
    return {
        "tokens": tokens,
        "token_logprobs": [best] * len(tokens),
        "top_logprobs": [{t: best, **other} for t in tokens],
    }


def build_app(faults: Faults) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        return await respond(request, True, faults)

    if "chat only" not in faults:

        @app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            return await respond(request, False, faults)

    return app


async def respond(request: Request, chat: bool, faults: Faults) -> Any:
    try:
        try:
            body = json.loads(await request.body())
        except ValueError as problem:
            raise Broken(400, "no JSON") from problem
        validate(body, chat, faults)
    except Broken as problem:
        error = {"message": str(problem), "type": "invalid_request_error"}
        plain = "plain errors" in faults
        return JSONResponse({"detail": "no"} if plain else {"error": error}, problem.status)
    if "fails often" in faults and len(faults.requests) % 3 == 2:
        faults.requests.append(body)
        return JSONResponse({"error": {"message": "queue full", "type": "overloaded"}}, 429)
    faults.requests.append(body)
    faults.active += 1
    try:
        await asyncio.sleep(0.002)
        tokens, reason = answer_tokens(body, chat, faults)
    finally:
        faults.active -= 1
    if body.get("stream"):
        events = stream(body, chat, tokens, reason, faults)
        return StreamingResponse(events, media_type="text/event-stream")
    choices = []
    for index in range(1 if "one choice" in faults else body.get("n", 1)):
        text = "".join(tokens)
        if body.get("echo"):
            text = prompt_text(body, chat) + text
        part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": index, "finish_reason": reason, **part}
        if body.get("logprobs"):
            choice["logprobs"] = logprobs(tokens, chat, faults)
        choices.append(choice)
    return {"id": "x", "choices": choices, "usage": usage(body, chat, len(tokens), faults)}


def usage(body: dict[str, Any], chat: bool, count: int, faults: Faults) -> dict[str, int]:
    num_prompt = len(tokens_of(prompt_text(body, chat)))
    if isinstance(body.get("prompt"), list):
        num_prompt = len(body["prompt"])
    total = num_prompt + count + (1 if "usage does not add up" in faults else 0)
    return {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": total}


async def stream(
    body: dict[str, Any], chat: bool, tokens: list[str], reason: str, faults: Faults
) -> AsyncIterator[str]:
    sent = tokens[1:] if "stream differs" in faults else tokens
    try:
        for token in sent:
            await asyncio.sleep(0.001)
            part = {"delta": {"content": token}} if chat else {"text": token}
            yield event({"choices": [{"index": 0, "finish_reason": None, **part}]})
    except asyncio.CancelledError:
        faults.was_left = True
        raise
    part = {"delta": {}} if chat else {"text": ""}
    yield event({"choices": [{"index": 0, "finish_reason": reason, **part}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({"choices": [], "usage": usage(body, chat, len(tokens), faults)})
    if "no end of stream" not in faults:
        yield "data: [DONE]\n\n"


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


@dataclass
class StandIn:
    url: str
    faults: Faults


@pytest.fixture
def start_service() -> Iterator[Callable[..., StandIn]]:
    """Starts a service with the named faults on a free port; all are stopped at the end."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(*names: str) -> StandIn:
        faults = Faults(frozenset(names))
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))  # asyncio sends at once only where the protocol is named
        server = uvicorn.Server(uvicorn.Config(build_app(faults), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the service did not start"
            time.sleep(0.01)
        return StandIn(f"http://127.0.0.1:{listener.getsockname()[1]}", faults)

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(timeout=20)
