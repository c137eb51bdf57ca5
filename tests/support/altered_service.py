"""A service in front of a real one that passes everything on, altered in one way.

Knows the protocol's JSON and nothing of models: what it alters is what broken services show.
"""

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

Json = dict[str, Any]


def _parts(answer: Json) -> list[Json]:
    """The messages of a whole answer, or the deltas of an event."""
    return [c.get("message") or c.get("delta") or {} for c in answer.get("choices", [])]


def _same_answer(body: Json, answer: Json) -> Json:
    for part in _parts(answer):
        if part.get("content"):
            part["content"] = "red"
    return answer


def _drop_streamed_reasoning(body: Json, answer: Json) -> Json:
    for part in _parts(answer) if body.get("stream") else []:
        if part.get("reasoning_content"):
            part["reasoning_content"] = part["reasoning_content"][1:]
    return answer


def _drop_streamed_arguments(body: Json, answer: Json) -> Json:
    for part in _parts(answer) if body.get("stream") else []:
        for call in part.get("tool_calls") or []:
            call["function"].pop("arguments", None)
    return answer


def _cut_arguments(body: Json, answer: Json) -> Json:
    for part in _parts(answer):
        for call in part.get("tool_calls") or []:
            text = call["function"].get("arguments") or ""
            call["function"]["arguments"] = text.replace("}", "")
    return answer


def _thoughts_as_text(body: Json, answer: Json) -> Json:
    for part in _parts(answer):
        thought = part.pop("reasoning_content", None)
        if thought:
            part["content"] = f"<think>{thought}</think>{part.get('content') or ''}"
    return answer


def _without_images(body: Json) -> Json:
    for message in body.get("messages") or []:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            message["content"] = "".join(texts)
    return body


ANSWERS: dict[str, Callable[[Json, Json], Json]] = {
    "same answer": _same_answer,
    "streamed reasoning differs": _drop_streamed_reasoning,
    "streamed call differs": _drop_streamed_arguments,
    "calls are no JSON": _cut_arguments,
    "thoughts as text": _thoughts_as_text,
}
REQUESTS: dict[str, Callable[[Json], Json]] = {"blind": _without_images}


def _application(url: str, fault: str) -> FastAPI:
    app = FastAPI()
    client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=120)
    alter = ANSWERS.get(fault, lambda body, answer: answer)

    @app.get("/{path:path}")
    async def get(path: str) -> Response:
        answer = await client.get(f"/{path}")
        return Response(answer.content, answer.status_code, media_type="application/json")

    @app.post("/{path:path}")
    async def post(path: str, request: Request) -> Response:
        content = await request.body()
        try:
            body = json.loads(content)
        except ValueError:
            body = {}
        if fault == "text only" and "image_url" in content.decode():
            error = {"message": "this model takes no images", "type": "invalid_request_error"}
            return Response(json.dumps({"error": error}), 400, media_type="application/json")
        if fault in REQUESTS:
            content = json.dumps(REQUESTS[fault](body)).encode()
        sent = client.build_request("POST", f"/{path}", content=content, headers=_JSON)
        answer = await client.send(sent, stream=True)
        if answer.headers["content-type"].startswith("text/event-stream"):
            return StreamingResponse(events(answer, body), media_type="text/event-stream")
        whole = await answer.aread()
        if answer.status_code == 200:
            whole = json.dumps(alter(body, json.loads(whole))).encode()
        return Response(whole, answer.status_code, media_type="application/json")

    async def events(answer: httpx.Response, body: Json) -> AsyncIterator[str]:
        try:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    line = "data: " + json.dumps(alter(body, json.loads(line[6:])))
                yield line + "\n"
        finally:
            await answer.aclose()

    return app


_JSON = {"Content-Type": "application/json"}


@contextmanager
def altered(url: str, fault: str) -> Iterator[str]:
    """Gives the address of a service like the one at `url`, with a fault."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_application(url, fault), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the service did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
