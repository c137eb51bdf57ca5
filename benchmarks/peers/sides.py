"""Owns the sides of the serving benchmark: how each is started, asked, measured and stopped.

Knows nothing of which questions the benchmark asks or how results are shown.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import psutil
from peers.machine import resident_bytes

from firstlight.accept.bench_load import Dialect, Target, find_model, run_load
from firstlight.accept.bench_numbers import RequestRecord
from firstlight.accept.bench_prompts import Prompt
from firstlight.accept.bench_settings import BenchSettings
from firstlight.accept.client import Endpoint, post

START_LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch of requests; seconds, and tokens/s while every request of it was decoding."""

    wall: float
    decode_tokens_per_second: float | None
    num_tokens: int


class Side(Protocol):
    """Someone who can answer prompts."""

    name: str

    def start(self) -> float:
        """Starts and waits until ready; returns the seconds it took."""
        ...

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Timing:
        """Answers all prompts at once, `num_tokens` each."""
        ...

    def answer(self, prompt: list[int], num_tokens: int) -> str:
        """The greedy text of one answer."""
        ...

    def memory(self) -> dict[str, int]:
        """PSS and RSS of all processes, in bytes."""
        ...

    def stop(self) -> None:
        """Ends all processes."""
        ...


class TransformersSide:
    """transformers `generate` in a child process."""

    name = "transformers"

    def __init__(
        self, model_folder: Path, num_threads: int, tokenizer: object, environment: dict[str, str]
    ) -> None:
        script = Path(__file__).with_name("transformers_generate.py")
        self._command = [sys.executable, str(script), str(model_folder), str(num_threads)]
        self._environment = environment
        self._tokenizer = tokenizer

    def start(self) -> float:
        began = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (kept while the child lives)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
        )
        self._read()
        return time.perf_counter() - began

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"transformers ended:\n{self._log.read()[-2000:]}")
        found: dict[str, object] = json.loads(line)
        return found

    def _ask(self, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, object]:
        assert self._process.stdin is not None
        request = {"prompts": list(prompts), "num_tokens": num_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Timing:
        found = self._ask(prompts, num_tokens)
        steps, wall = found["steps"], found["wall"]
        assert isinstance(steps, list) and isinstance(wall, float)
        rate = None
        if len(steps) > 1:
            rate = len(prompts) * (len(steps) - 1) / (steps[-1] - steps[0])
        return Timing(wall, rate, len(prompts) * len(steps))

    def answer(self, prompt: list[int], num_tokens: int) -> str:
        tokens = self._ask([prompt], num_tokens)["tokens"]
        assert isinstance(tokens, list)
        return str(self._tokenizer.decode(tokens[0]))  # type: ignore[attr-defined]

    def memory(self) -> dict[str, int]:
        return resident_bytes(self._process.pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started and when it is ready."""

    arguments: tuple[str, ...]
    port: int
    ready_path: str
    environment: dict[str, str]


class ServerSide:
    """A server with the OpenAI interface, in processes of its own."""

    def __init__(self, name: str, command: ServerCommand) -> None:
        self.name = name
        self._command = command
        self._endpoint = Endpoint(f"http://127.0.0.1:{command.port}")

    def start(self) -> float:
        began = time.perf_counter()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (kept while the child lives)
        self._process = subprocess.Popen(
            self._command.arguments,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._command.environment,
            start_new_session=True,
        )
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended before it was ready:\n{self._tail()}")
            if time.perf_counter() - began > START_LIMIT_SECONDS:
                self.stop()
                raise SystemExit(f"{self.name} was not ready in time:\n{self._tail()}")
            time.sleep(0.02)
        return time.perf_counter() - began

    def _is_ready(self) -> bool:
        try:
            url = self._endpoint.root + self._command.ready_path
            return httpx.get(url, timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Timing:
        records = asyncio.run(self._load(prompts, num_tokens))
        failed = [record for record in records if record.failure]
        if failed:
            raise SystemExit(
                f"{self.name}: {failed[0].failure}: {failed[0].detail}\n{self._tail()}"
            )
        wall = max(r.ended for r in records) - min(r.due for r in records)
        return Timing(wall, decode_rate(records), sum(r.output_tokens for r in records))

    async def _load(self, prompts: Sequence[list[int]], num_tokens: int) -> list[RequestRecord]:
        settings = BenchSettings(self._endpoint, concurrency=len(prompts), output_tokens=num_tokens)
        async with self._endpoint.open(len(prompts)) as client:
            model = await find_model(client, "")
            target = Target(settings, model, Dialect(True, True, True))
            asked = [Prompt("", tuple(prompt), len(prompt)) for prompt in prompts]
            records, _ = await run_load(client, target, asked)
        return records

    def answer(self, prompt: list[int], num_tokens: int) -> str:
        return asyncio.run(self._answer(prompt, num_tokens))

    async def _answer(self, prompt: list[int], num_tokens: int) -> str:
        async with self._endpoint.open() as client:
            model = await find_model(client, "")
            body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
            reply = await post(client, "/v1/completions", {**body, "ignore_eos": True})
        if not reply.ok:
            raise SystemExit(f"{self.name}: HTTP {reply.status}: {reply.error_message}")
        return str(reply.body["choices"][0]["text"])

    def memory(self) -> dict[str, int]:
        return resident_bytes(self._process.pid)

    def stop(self) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, left = psutil.wait_procs(family, timeout=10)
        for process in left:
            process.kill()


def decode_rate(records: Sequence[RequestRecord]) -> float | None:
    """Tokens/s of all requests from the last first chunk to the first last chunk.

    A chunk counts for as many tokens as the request's chunks hold on average.
    """
    if any(len(record.chunks) < 2 for record in records):
        return None
    begin = max(record.chunks[0] for record in records)
    end = min(record.chunks[-1] for record in records)
    if end <= begin:
        return None
    tokens = sum(
        sum(begin < chunk <= end for chunk in record.chunks)
        * (record.output_tokens / len(record.chunks))
        for record in records
    )
    return tokens / (end - begin)
