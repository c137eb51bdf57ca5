"""A service in front of a real one that passes everything on, altered in one way.

Knows the protocol's JSON and nothing of models: what it alters is what broken services show. What
the real one answered may be kept, so that the same requests cost it nothing under the next fault.
"""

import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

Json = dict[str, Any]
_STREAM = "text/event-stream"


class Kept(NamedTuple):
    """One answer of the real service, whole: a stream as its lines."""

    status: int
    kind: str
    lines: list[str]


Answers = dict[tuple[str, bytes], Kept]


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


class _Upstream:
    """The real service, with what it answered to requests so far."""

    def __init__(self, url: str, kept: Answers) -> None:
        self.client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=120)
        self._kept = kept

    async def ask(self, path: str, content: bytes) -> tuple[int, str, AsyncGenerator[str, None]]:
        """Status, kind and lines of the answer to a request."""
        if found := self._kept.get((path, content)):
            return found.status, found.kind, _each(found.lines)
        sent = self.client.build_request("POST", f"/{path}", content=content, headers=_JSON)
        answer = await self.client.send(sent, stream=True)
        kind = answer.headers["content-type"].partition(";")[0]
        return answer.status_code, kind, self._keeping((path, content), answer, kind)

    async def _keeping(
        self, key: tuple[str, bytes], answer: httpx.Response, kind: str
    ) -> AsyncGenerator[str, None]:
        """The lines as they come; they are kept when all came."""
        lines: list[str] = []
        try:
            async for line in answer.aiter_lines():
                lines.append(line)
                yield line
        finally:
            await answer.aclose()
        self._kept[key] = Kept(answer.status_code, kind, lines)


async def _each(lines: list[str]) -> AsyncGenerator[str, None]:
    for line in lines:
        yield line


def _application(url: str, fault: str, kept: Answers) -> FastAPI:
    app = FastAPI()
    upstream = _Upstream(url, kept)
    alter = ANSWERS.get(fault, lambda body, answer: answer)

    @app.get("/{path:path}")
    async def get(path: str) -> Response:
        answer = await upstream.client.get(f"/{path}")
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
        status, kind, lines = await upstream.ask(path, content)
        if kind == _STREAM:
            return StreamingResponse(events(lines, body), media_type=_STREAM)
        whole = "\n".join([line async for line in lines])
        if status == 200:
            whole = json.dumps(alter(body, json.loads(whole)))
        return Response(whole, status, media_type="application/json")

    async def events(lines: AsyncGenerator[str, None], body: Json) -> AsyncGenerator[str, None]:
        async with aclosing(lines):
            async for line in lines:
                if line.startswith("data: {"):
                    line = "data: " + json.dumps(alter(body, json.loads(line[6:])))
                yield line + "\n"

    return app


_JSON = {"Content-Type": "application/json"}


@contextmanager
def altered(url: str, fault: str, kept: Answers) -> Iterator[str]:
    """Gives the address of a service like the one at `url`, with a fault. `kept` holds its answers,
    is filled here, and may be given again.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(_application(url, fault, kept), log_level="error"))
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
