"""Owns how an OpenAI-compatible endpoint is spoken to over HTTP, and how its event streams are cut.

Knows nothing of which server answers, of what the answers should say, or of any engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from firstlight.errors import EnvironmentProblem, UsageError

Api = Literal["chat", "completions"]
Body = Mapping[str, Any]
PATHS: Mapping[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a service answers; `base_url` may or may not end in `/v1`."""

    base_url: str
    api_key: str = field(default="", repr=False)
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise UsageError(
                f"{self.base_url!r} is no address of a service; write for example "
                "http://127.0.0.1:8000"
            )
        if self.timeout_seconds <= 0:
            raise UsageError(
                f"the time limit of a request is {self.timeout_seconds} s; it must be > 0"
            )

    @property
    def root(self) -> str:
        """The address without a closing slash and without `/v1`."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def open(self, max_connections: int = 64) -> httpx.AsyncClient:
        """Opens a client that keeps up to `max_connections` connections; close it after use."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        )
        timeout = httpx.Timeout(self.timeout_seconds, connect=min(30.0, self.timeout_seconds))
        return httpx.AsyncClient(
            base_url=self.root, headers=headers, limits=limits, timeout=timeout, trust_env=False
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole HTTP answer; `body` is the parsed JSON, or None when it is none."""

    status: int
    body: Any
    text: str

    @property
    def ok(self) -> bool:
        """Whether the status is 200 and the body is a JSON object."""
        return self.status == 200 and isinstance(self.body, dict)

    @property
    def error_message(self) -> str:
        """The message of an OpenAI error body, else the beginning of whatever came."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return message if isinstance(message, str) and message else self.text[:200]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event and when it arrived, in seconds of `time.perf_counter`."""

    seconds: float
    data: str

    @property
    def is_done(self) -> bool:
        """Whether this is the closing `[DONE]`."""
        return self.data.strip() == "[DONE]"

    def parse(self) -> dict[str, Any]:
        """Reads the event as a JSON object; raises BrokenStream when it is none."""
        try:
            value = json.loads(self.data)
        except ValueError as problem:
            raise BrokenStream(f"an event is no JSON: {self.data[:120]!r}") from problem
        if not isinstance(value, dict):
            raise BrokenStream(f"an event is no JSON object: {self.data[:120]!r}")
        return value


class StreamRefused(Exception):
    """The endpoint answered a streaming request with an error status."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"HTTP {answer.status}: {answer.error_message}")
        self.answer = answer


class BrokenStream(Exception):
    """A stream held something that is no event of this protocol, or ended too early."""


class EventParser:
    """Cuts server-sent events out of bytes that arrive in pieces of any size.

    Lines end at LF, CR LF or CR only: JSON may hold other line separators, and a character may be
    split between two pieces.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Takes the next bytes and returns the data of every event they complete."""
        *lines, self._rest = self._cut(self._rest + piece)
        return [event for line in lines if (event := self._take(line)) is not None]

    @staticmethod
    def _cut(text: bytes) -> list[bytes]:
        held = text.endswith(b"\r")  # an LF may follow in the next piece
        body = text[:-1] if held else text
        lines = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if held:
            lines[-1] += b"\r"
        return lines

    def _take(self, line: bytes) -> str | None:
        if not line:
            if not self._data:
                return None
            event, self._data = b"\n".join(self._data), []
            return event.decode("utf-8", errors="replace")
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None


async def get(client: httpx.AsyncClient, path: str) -> Answer:
    """Gets a path; raises EnvironmentProblem when no service answers."""
    try:
        return _answer(await client.get(path))
    except httpx.TransportError as problem:
        raise unreachable(client, path, problem) from problem


async def post(client: httpx.AsyncClient, path: str, body: Any) -> Answer:
    """Posts JSON and returns the answer whatever its status.

    Raises EnvironmentProblem when no service answers.
    """
    return await post_bytes(client, path, _encode(body))


async def post_bytes(client: httpx.AsyncClient, path: str, content: bytes) -> Answer:
    """Posts bytes that call themselves JSON, whatever they are; else like `post`."""
    try:
        return _answer(await client.post(path, content=content, headers=_JSON))
    except httpx.TransportError as problem:
        raise unreachable(client, path, problem) from problem


async def stream(
    client: httpx.AsyncClient, path: str, body: Body
) -> AsyncGenerator[StreamEvent, None]:
    """Posts a streaming request and yields its events up to and with `[DONE]`.

    Close it (`contextlib.aclosing`) when leaving early; that drops the connection. Raises
    StreamRefused on an error status, BrokenStream when the stream ends without `[DONE]`, and
    httpx.TransportError when the connection fails.
    """
    parser, done = EventParser(), False
    async with client.stream("POST", path, content=_encode(body), headers=_JSON) as response:
        if response.status_code != 200:
            await response.aread()
            raise StreamRefused(_answer(response))
        async for piece in response.aiter_bytes():  # to the end: the connection is used again
            seconds = time.perf_counter()
            for data in () if done else parser.feed(piece):
                event = StreamEvent(seconds, data)
                yield event
                if event.is_done:
                    done = True
                    break
    if not done:
        raise BrokenStream("the stream ended without [DONE]")


def unreachable(
    client: httpx.AsyncClient, path: str, problem: httpx.TransportError
) -> EnvironmentProblem:
    """Turns a failed connection into the message a user gets."""
    what = "did not answer in time" if isinstance(problem, httpx.TimeoutException) else "failed"
    address = str(client.base_url).rstrip("/") + path
    return EnvironmentProblem(
        f"{address}: the request {what} ({type(problem).__name__}: {problem}); check that the "
        "service runs, that the address and port are right, and its log"
    )


_JSON: Mapping[str, str] = {"Content-Type": "application/json"}


def _encode(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _answer(response: httpx.Response) -> Answer:
    try:
        body = response.json()
    except ValueError:
        body = None
    return Answer(response.status_code, body, response.text)
