"""A real `firstlight serve` process with its engine and ranks, seen from outside.

Knows processes, HTTP and the log; nothing of what runs inside.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

COMMAND = [sys.executable, "-m", "firstlight.cli.main", "serve"]
START_SECONDS = 120.0
_SAMPLE = re.compile(r"^firstlight_(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class LiveService:
    """One started service. `wait_ready` first; `close` ends everything it started."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self._log = log
        self._family: dict[int, psutil.Process] = {}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*COMMAND, str(model), "--port", "0", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.process_id = self._process.pid
        self.url = ""

    @property
    def log(self) -> str:
        """All the service has written."""
        return self._log.read_text(errors="replace")

    def wait_ready(self, seconds: float = START_SECONDS) -> "LiveService":
        """Waits until /ready says yes."""
        self.wait_for(self._is_ready, seconds, "ready")
        return self

    def _is_ready(self) -> bool:
        self.family()
        assert self._process.poll() is None, f"ended with {self._process.poll()}:\n{self.log}"
        self.find_address()
        return bool(self.url) and self.status("/ready") == 200

    def find_address(self) -> bool:
        """Says whether the service listens; then `url` is set."""
        found = re.search(r"listening on (http://\S+)", self.log)
        self.url = found[1] if found else ""
        return bool(found)

    def client(self, timeout: float = 60.0) -> httpx.Client:
        """A plain HTTP client."""
        return httpx.Client(base_url=self.url, trust_env=False, timeout=timeout)

    def get(self, path: str) -> httpx.Response:
        """Gets a path."""
        with self.client() as client:
            return client.get(path)

    def status(self, path: str) -> int | None:
        """The status of a GET, None when nobody answers."""
        try:
            with self.client(5.0) as client:
                return client.get(path).status_code
        except httpx.TransportError:
            return None

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        """Asks for a greedy completion."""
        with self.client() as client:
            return client.post("/v1/completions", json=self.body(prompt, **fields))

    def body(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The body of a greedy completion with its token ids."""
        basis = {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True}
        return {**basis, **fields}

    def stream(self, prompt: Any, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yields the events of a streamed completion, without the closing one."""
        body = self.body(prompt, stream=True, **fields)
        with self.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def metrics(self) -> dict[str, float]:
        """Every sample by name, `name{labels}` where it has labels."""
        found = _SAMPLE.findall(self.get("/metrics").text)
        return {n + (f"{{{labels}}}" if labels else ""): float(v) for n, labels, v in found}

    def family(self) -> list[psutil.Process]:
        """The service's process, its engine and its ranks that run now."""
        try:
            first = psutil.Process(self.process_id)
            found = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._family |= {process.pid: process for process in found}
        return found

    def engine(self) -> psutil.Process:
        """The engine's process."""
        return self._running("firstlight.engine.main")[0]

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes, in rank order."""
        found = self._running("firstlight.runner.worker")
        return sorted(found, key=lambda p: int(json.loads(p.cmdline()[-1])["rank"]))

    def _running(self, module: str) -> list[psutil.Process]:
        return [p for p in self.family() if module in p.cmdline()]

    def survivors(self) -> list[psutil.Process]:
        """Those of all processes ever seen of this service that still run."""
        return [
            p
            for p in self._family.values()
            if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
        ]

    def terminate(self) -> None:
        """Asks for an orderly end."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the first process alone, at once."""
        self._process.kill()
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Whether the first process has ended."""
        return self._process.poll() is not None

    def wait_exit(self, seconds: float = 30.0) -> int:
        """Waits for the first process to end by itself and returns its exit code."""
        return self._process.wait(seconds)

    def wait_for(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits until something holds; fails with the log when it never does."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not {what} after {seconds} s:\n{self.log[-2000:]}"
            time.sleep(0.05)

    def close(self) -> None:
        """Ends every process of this service that still runs."""
        self.family()
        for process in self.survivors():
            process.kill()
        self._process.wait()
