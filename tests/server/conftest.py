"""Fixtures of the server's tests: a small model folder, and real servers over a scripted engine."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.inputs.chat_format import load_chat_format
from firstlight.inputs.generation_defaults import read_generation_defaults
from firstlight.inputs.tokenizer import Tokenizer, load_tokenizer
from firstlight.metrics.series import Series
from firstlight.server.context import AppContext, Limits
from firstlight.server.listener import bind_socket
from firstlight.server.serving import serve_app

sys.path.insert(0, str(Path(__file__).parent))
from scripted_engine import ScriptedEngine
from small_model import make_model_folder

CONTEXT_LENGTH = 256


@dataclass
class RunningServer:
    """A real server on a free port in a thread of its own."""

    context: AppContext
    engine: ScriptedEngine
    url: str = ""
    exit_code: int | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _asked: asyncio.Event | None = None
    _thread: threading.Thread | None = field(default=None)

    def start(self) -> None:
        """Starts to serve."""
        listener = bind_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async def run() -> None:
            self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()
            self.exit_code = await serve_app(self.context, listener, asked_to_end=self._asked)

        self._thread = threading.Thread(target=lambda: asyncio.run(run()))
        self._thread.start()
        httpx.get(self.url + "/version", trust_env=False, timeout=10)

    def ask_to_end(self) -> None:
        """Begins the drain."""
        assert self._loop is not None and self._asked is not None
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._asked.set)

    def join(self) -> int | None:
        """Waits for the end and gives the exit code."""
        assert self._thread is not None
        self._thread.join(15)
        assert not self._thread.is_alive(), "the server did not end"
        return self.exit_code

    def client(self, **options: Any) -> httpx.Client:
        """A plain HTTP client of this server."""
        return httpx.Client(base_url=self.url, trust_env=False, timeout=15, **options)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Posts JSON."""
        with self.client() as client:
            return client.post(path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Gets a path."""
        with self.client() as client:
            return client.get(path, headers=headers)


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder."""
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """Its tokenizer."""
    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def make_server(model_folder: Path, tokenizer: Tokenizer) -> Callable[..., RunningServer]:
    """Makes a server that is not started; `engine` and `limits` are options, the rest context."""
    chat_format = load_chat_format(model_folder, tokenizer)
    defaults = read_generation_defaults(model_folder)

    def make(
        engine: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **context: Any
    ) -> RunningServer:
        scripted = ScriptedEngine(context.get("tokenizer", tokenizer), **(engine or {}))
        series = Series()
        settings: dict[str, Any] = {
            "engine": scripted,
            "tokenizer": tokenizer,
            "chat_format": chat_format,
            "defaults": defaults,
            "model_names": ("small", "alias"),
            "context_length": CONTEXT_LENGTH,
            "recorder": series,
            "read_series": series.flatten,
            "limits": Limits(**{"drain_seconds": 2.0, **(limits or {})}),
            "created": 1,
            **context,
        }
        return RunningServer(AppContext(**settings), scripted)

    return make


@pytest.fixture
def start_server(make_server: Callable[..., RunningServer]) -> Iterator[StartServer]:
    """Starts servers and ends them after the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> RunningServer:
            server = make_server(**options)
            server.start()
            stack.callback(server.join)
            stack.callback(server.ask_to_end)
            return server

        yield start


@pytest.fixture(scope="session")
def server(make_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """One server that many tests share."""
    running = make_server()
    running.start()
    yield running
    running.ask_to_end()
    assert running.join() == 0
