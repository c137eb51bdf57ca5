"""Owns the clients of a soak: they ask at random, leave at random, and compare what they hear.

Knows the protocol and nothing of the service's inside.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from soak_requests import COMPLETIONS, Bad, Question

from firstlight.accept.samples import calls_problem, is_right

# A pause of the whole machine is no failure of a service.
READ_SECONDS = 900.0
JSON = {"Content-Type": "application/json"}


@dataclass
class Choice:
    """What was heard of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None

    def take(self, part: dict[str, Any]) -> None:
        """Adds a whole choice or one of its events."""
        said = part.get("message") or part.get("delta") or part
        self.token_ids += part.get("token_ids") or []
        self.text += said.get("content") or said.get("text") or ""
        self.reasoning += said.get("reasoning_content") or ""
        self.calls += [
            {name: call["function"][name] for name in ("name", "arguments")}
            for call in said.get("tool_calls") or []
        ]
        self.finish = part.get("finish_reason") or self.finish


@dataclass
class Heard:
    """What came back for one request, as far as it came."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    error: str = ""
    is_whole: bool = False
    prompt_ids: list[int] = field(default_factory=list)

    def take(self, body: dict[str, Any]) -> None:
        """Adds an answer or one event of a stream."""
        if "error" in body:
            self.error = str(body["error"].get("message"))
        for part in body.get("choices", []):
            self.choices.setdefault(part["index"], Choice()).take(part)
            self.prompt_ids = part.get("prompt_token_ids") or self.prompt_ids


class Differs(NamedTuple):
    """Two answers to one question, token ids up to and with the first that differ."""

    question: Question
    prompt_ids: list[int]
    one: list[int]
    other: list[int]


@dataclass
class Ledger:
    """Counts of what was asked and heard, answers by question, and everything that was wrong."""

    asked: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    differ: list[Differs] = field(default_factory=list)
    tokens: int = 0
    slowest: float = 0.0
    answers: dict[tuple[int, int], Choice] = field(default_factory=dict)

    def check(self, question: Question, heard: Heard) -> None:
        """Compares an answer, whole or cut off by its client, with the first whole one."""
        for index, choice in heard.choices.items():
            self.tokens += len(choice.token_ids)
            if heard.is_whole and choice.finish is None:
                self.problems.append(f"{question.kind} {question.number}: no finish reason")
            known = self.answers.get((question.number, index))
            if known is None:
                if heard.is_whole:
                    self.answers[question.number, index] = choice
                    self._check_right(question, choice)
            elif question.kind != "pictures" or heard.is_whole:
                self._compare(question, heard, known, choice)

    def _check_right(self, question: Question, choice: Choice) -> None:
        sample = question.sample
        if sample is None:
            return
        wrong = calls_problem(sample.calls or (), tuple(choice.calls))
        if not is_right(sample, choice.text):
            wrong = f"{choice.text!a}, wanted {sample.accept!a}"
        if sample.reasoning is not None and choice.reasoning != sample.reasoning:
            wrong = f"reasoning {choice.reasoning!a}, wanted {sample.reasoning!a}"
        if wrong:
            self.problems.append(f"{sample.name}: {wrong}")

    def _compare(self, question: Question, heard: Heard, known: Choice, choice: Choice) -> None:
        name = "drawn" if question.drawn else "greedy"
        count = len(choice.token_ids)
        if not heard.is_whole:
            name += ", cut off"
        self.compared[name] += 1
        if choice.token_ids != known.token_ids[: len(choice.token_ids)]:
            pairs = zip(choice.token_ids, known.token_ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), count - 1)
            one, other = known.token_ids[: first + 1], choice.token_ids[: first + 1]
            self.differ.append(Differs(question, heard.prompt_ids, one, other))
        elif heard.is_whole and (choice.text, choice.calls, choice.finish) != (
            known.text,
            known.calls,
            known.finish,
        ):
            self.problems.append(f"{question.kind} {question.number}: same tokens, {choice}")


class Clients:
    """Clients of one service that share questions and a ledger. `until` says when to stop."""

    def __init__(self, url: str, questions: list[Question], bad: list[Bad], ledger: Ledger) -> None:
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(READ_SECONDS)
        self.http = httpx.AsyncClient(base_url=url, trust_env=False, timeout=timeout, limits=limits)
        self.questions, self._bad, self.ledger = questions, bad, ledger

    async def run(self, number: int, stop: asyncio.Event) -> None:
        """One client: asks one thing after another until it is told to stop."""
        draw = random.Random(number)
        while not stop.is_set():
            if draw.random() < 0.08:
                await self.refused(draw.choice(self._bad))
            else:
                await self.ask(draw.choice(self.questions), draw)
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.3)

    async def ask(self, question: Question, draw: random.Random) -> Heard:
        """Asks a question in some way, and reads to the end or leaves before."""
        body = dict(question.fields)
        body["stream"] = draw.random() < 0.6
        if draw.random() < 0.3:
            body["priority"] = draw.choice([-1, 1, 2])
        if draw.random() < 0.15:
            body["cache_salt"] = draw.choice(["one", "two"])
        if draw.random() < 0.2:
            body["prompt_cache_key"] = "key"
        leaves = draw.random() < 0.2
        patience = draw.choice([0.0, 0.02, 0.1, 0.5, 2.0]) if leaves else None
        return await self.send(question, body, patience)

    async def send(
        self, question: Question, body: dict[str, Any], patience: float | None = None
    ) -> Heard:
        """Sends a body, and closes the connection after so many seconds."""
        heard, began = Heard(), time.monotonic()
        self.ledger.asked[question.kind] += 1
        try:
            await asyncio.wait_for(self._read(question.path, body, heard), patience)
            self._note(question, heard)
            self.ledger.slowest = max(self.ledger.slowest, time.monotonic() - began)
        except asyncio.TimeoutError:
            self.ledger.ended["client left"] += 1
        except httpx.HTTPError as problem:
            self.ledger.ended["connection failed"] += 1
            self.ledger.problems.append(f"{question.kind} {question.number}: {problem!r}")
        self.ledger.check(question, heard)
        return heard

    async def _read(self, path: str, body: dict[str, Any], heard: Heard) -> None:
        async with self.http.stream("POST", path, json=body) as answer:
            heard.status = answer.status_code
            if answer.headers["content-type"].startswith("text/event-stream"):
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        heard.take(json.loads(line[6:]))
                    heard.is_whole |= line == "data: [DONE]"
            else:
                heard.take(json.loads(await answer.aread()))
                heard.is_whole = answer.status_code == 200

    def _note(self, question: Question, heard: Heard) -> None:
        if heard.status == 429:
            self.ledger.ended["queue full"] += 1
        elif heard.is_whole and not heard.error:
            self.ledger.ended["answered"] += 1
        else:
            self.ledger.ended["failed"] += 1
            self.ledger.problems.append(
                f"{question.kind} {question.number}: status {heard.status}, {heard.error or heard}"
            )

    async def refused(self, bad: Bad) -> None:
        """Sends what is to be refused, and reads why."""
        self.ledger.asked["bad request"] += 1
        answer = await self.http.post(bad.path, content=bad.content, headers=JSON)
        problem = ""
        if answer.status_code != bad.status:
            problem = f"status {answer.status_code}, not {bad.status}: {answer.text[:200]}"
        elif not answer.json()["error"]["message"]:
            problem = "no word why"
        self.ledger.ended["refused"] += 1
        if problem:
            self.ledger.problems.append(f"{bad.name}: {problem}")

    async def how_close(self, found: Differs) -> float:
        """How far apart the log-probabilities of the two tokens are at which answers part, asked
        anew; infinite where the question cannot be asked as token ids.
        """
        if not found.prompt_ids or found.question.kind == "pictures":
            return float("inf")
        scores = []
        for token in (found.one[-1], found.other[-1]):
            body = {
                "model": found.question.fields["model"],
                "prompt": [*found.prompt_ids, *found.one[:-1], token],
                "max_tokens": 0,
                "echo": True,
                "logprobs": 0,
                "cache_salt": "judge",
            }
            answer = (await self.http.post(COMPLETIONS, json=body)).json()
            scores.append(answer["choices"][0]["logprobs"]["token_logprobs"][-1])
        return abs(scores[0] - scores[1])

    async def close(self) -> None:
        """Closes what connections are left."""
        await self.http.aclose()
