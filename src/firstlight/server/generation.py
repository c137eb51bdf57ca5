"""Owns driving the engine for one HTTP request: submits choices, merges deltas, ends them.

Knows nothing of the shape of answers. However the request ends, nothing of it stays in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec

from firstlight.engine.messages import Output
from firstlight.errors import EnvironmentProblem, RequestError
from firstlight.metrics.events import (
    CompletionEnded,
    CompletionReceived,
    FirstToken,
    Outcome,
    Recorder,
)
from firstlight.schedule.request import MediaItem, SamplingParams, SubmittedRequest
from firstlight.server.answer_text import AnswerText, PlainAnswer
from firstlight.server.choice import Choice, Delta
from firstlight.server.context import AppContext
from firstlight.server.response_models import CompletionDetails, PromptDetails, Usage
from firstlight.server.sampling import choice_seeds


class Prompt(NamedTuple):
    """A prompt as token ids, with the parameters its choices share; `text` is what echo repeats.

    `media` are the images behind its placeholder tokens.
    """

    token_ids: list[int]
    params: SamplingParams
    text: str = ""
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine. Choice `i` belongs to prompt `i // num_choices`.

    `new_answer` makes the reader of a choice's output; None reads all of it as text. `cache_salt`
    and `cache_key` are the client's, empty for none.
    """

    completion_id: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    stop: tuple[str, ...]
    seed: int | None
    new_answer: Callable[[], AnswerText] | None = None
    cache_salt: str = ""
    cache_key: str = ""
    priority: int = 0

    def requests(self) -> Iterator[SubmittedRequest]:
        """The engine's requests, one a choice, with different seeds."""
        seeds = choice_seeds(self.seed, len(self.prompts) * self.num_choices)
        for index, seed in enumerate(seeds):
            prompt = self.prompts[index // self.num_choices]
            yield SubmittedRequest(
                request_id=f"{self.completion_id}-{index}",
                prompt_ids=prompt.token_ids,
                params=msgspec.structs.replace(prompt.params, seed=seed),
                media=prompt.media,
                salt=self.cache_salt,
                cache_hint=self.cache_key,
                priority=self.priority,
            )


class Generation:
    """One run of a job. `deltas` may be iterated once; close it to cancel what is unfinished."""

    def __init__(self, job: Job, context: AppContext) -> None:
        self.job = job
        self._context = context
        self._arrival = time.monotonic()
        self._choices = [
            Choice(index, request, self._new_answer())
            for index, request in enumerate(job.requests())
        ]
        self._found: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    def _new_answer(self) -> AnswerText:
        if self.job.new_answer is not None:
            return self.job.new_answer()
        return PlainAnswer(self._context.tokenizer, self.job.stop)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.job.prompts)
        num_generated = sum(choice.num_generated for choice in self._choices)
        firsts = self._choices[:: self.job.num_choices]
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(choice.num_cached for choice in firsts)
            ),
        )
        reasoning = [n for choice in self._choices if (n := choice.num_reasoning) is not None]
        if reasoning:
            usage.completion_tokens_details = CompletionDetails(reasoning_tokens=sum(reasoning))
        return usage

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields what becomes known of the choices until each has finished.

        Raises what the engine raises, and ApiFailure or CheckFailed when it ends a choice badly.
        """
        followers = [asyncio.create_task(self._follow(choice)) for choice in self._choices]
        num_open = len(followers)
        try:
            while num_open:
                found = await self._found.get()
                if isinstance(found, Exception):
                    raise found
                num_open -= found.finish is not None
                yield found
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    async def _follow(self, choice: Choice) -> None:
        """Follows one choice; leaving its stream before the engine is done cancels it there."""
        ledger = Ledger(choice, self._arrival, self._context.recorder)
        stream = self._context.engine.submit([choice.request])
        try:
            with ledger:
                async with aclosing(cast(AsyncGenerator[Output, None], stream)) as outputs:
                    async for output in outputs:
                        delta = choice.take(output)
                        ledger.note_first()
                        if delta is not None:
                            self._found.put_nowait(delta)
                        if choice.finish is not None:
                            return
                raise EnvironmentProblem("the engine left a request unfinished; send it again")
        except Exception as problem:
            self._found.put_nowait(problem)


class Ledger:
    """Records one choice's beginning, first token and end, whatever the end is."""

    def __init__(self, choice: Choice, arrival: float, recorder: Recorder) -> None:
        self._choice = choice
        self._arrival = arrival
        self._recorder = recorder
        self._noted_first = False

    def __enter__(self) -> None:
        self._recorder.record(CompletionReceived())

    def note_first(self) -> None:
        """Records the time to the first token, once it is there."""
        if not self._noted_first and self._choice.first_at is not None:
            self._noted_first = True
            self._recorder.record(FirstToken(self._choice.first_at - self._arrival))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        now = time.monotonic()
        choice = self._choice
        self._recorder.record(
            CompletionEnded(
                outcome=self._outcome(kind),
                num_prompt=len(choice.request.prompt_ids),
                num_cached=choice.num_cached,
                num_generated=choice.num_generated,
                seconds=now - self._arrival,
                decode_seconds=now - (choice.first_at or now),
            )
        )

    def _outcome(self, kind: type[BaseException] | None) -> Outcome:
        if self._choice.finish is not None:
            return "length" if self._choice.finish == "length" else "stop"
        assert kind is not None, "a choice ended without a reason"
        if issubclass(kind, RequestError):
            return "refused"
        return "error" if issubclass(kind, Exception) else "cancelled"
