"""Owns text completions: prompts in four forms, echo, and deltas to the shapes of their answers.

Knows the tokenizer and the shapes; nothing of connections or of how tokens are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from firstlight.errors import RequestError
from firstlight.schedule.request import SamplingParams
from firstlight.server.choice import Delta, PlacedToken
from firstlight.server.context import AppContext
from firstlight.server.generation import Job, Prompt
from firstlight.server.logprob_text import LogprobWriter, join_lists
from firstlight.server.request_fields import Prompt as GivenPrompt
from firstlight.server.request_models import CompletionRequest
from firstlight.server.response_models import (
    FinishText,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    Usage,
)
from firstlight.server.sampling import check_ids, stop_texts, to_sampling, with_length


async def to_completion_job(
    request: CompletionRequest, context: AppContext, completion_id: str
) -> Job:
    """Checks a completion request and turns it into work for the engine; raises RequestError."""
    given = _as_list(request.prompt)
    num_choices = request.n or 1
    if len(given) * num_choices > context.limits.max_choices:
        raise RequestError(
            f"{len(given)} prompts with {num_choices} choices each are more than the "
            f"{context.limits.max_choices} choices a request may have; send several requests",
            "prompt",
        )
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens is 0, which only makes sense with echo", "max_tokens")
    params = to_sampling(request, context)
    if request.logprobs is not None:
        scored = request.logprobs if request.echo else None
        params = msgspec.structs.replace(params, logprobs=request.logprobs, prompt_logprobs=scored)
    prompts = await asyncio.to_thread(_to_prompts, given, params, request.max_tokens, context)
    return Job(
        completion_id=completion_id,
        prompts=prompts,
        num_choices=num_choices,
        stop=stop_texts(request),
        seed=request.seed,
        cache_salt=request.cache_salt or "",
        cache_key=request.prompt_cache_key or "",
        priority=request.priority or 0,
    )


def _to_prompts(
    given: list[str] | list[list[int]],
    params: SamplingParams,
    max_tokens: int | None,
    context: AppContext,
) -> tuple[Prompt, ...]:
    tokenizer = context.tokenizer
    prompts = []
    for one in given:
        if isinstance(one, str):
            ids, text = tokenizer.encode(one, add_special=True), one
        else:
            check_ids(one, "prompt", context)
            ids, text = one, tokenizer.decode(one, skip_special=False)
        sized = with_length(params, len(ids), max_tokens, context)
        prompts.append(Prompt(ids, sized, text))
    return tuple(prompts)


def _as_list(prompt: GivenPrompt) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


class _Part(NamedTuple):
    """What one chunk, or the whole answer, says of a choice."""

    text: str
    tokens: list[PlacedToken]
    token_ids: list[int]
    finish: FinishText | None
    echoed: Delta | None


class CompletionShape:
    """Writes the answers to one completion request."""

    def __init__(
        self, request: CompletionRequest, job: Job, *, context: AppContext, created: int
    ) -> None:
        self._created = created
        self._model = request.model
        self._job = job
        self._echo = bool(request.echo)
        self._writer = (
            LogprobWriter(context.tokenizer, request.logprobs)
            if request.logprobs is not None
            else None
        )
        self._with_ids = bool(request.return_token_ids)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> Iterator[TextCompletion]:
        """One event for what came; the first of a choice begins with the echoed prompt."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        if first or delta.text or delta.tokens or delta.finish or self._with_ids:
            echoed = delta if first else None
            part = _Part(delta.text, delta.tokens, delta.token_ids, delta.finish, echoed)
            chunk = self._completion([self._choice(delta.index, part)])
            if self._with_usage:
                chunk.usage = None
            yield chunk

    def usage_chunk(self, usage: Usage) -> TextCompletion:
        """The last event before the end, if it was asked for."""
        chunk = self._completion([])
        chunk.usage = usage
        return chunk

    def whole(self, deltas: list[Delta], usage: Usage) -> TextCompletion:
        """The whole answer, made of the same deltas a stream is made of."""
        count = len(self._job.prompts) * self._job.num_choices
        answer = self._completion(
            [self._choice(index, _joined(index, deltas)) for index in range(count)]
        )
        answer.usage = usage
        return answer

    def _completion(self, choices: list[TextChoice]) -> TextCompletion:
        return TextCompletion(
            id=self._job.completion_id,
            created=self._created,
            model=self._model,
            object="text_completion",
            choices=choices,
        )

    def _choice(self, index: int, part: _Part) -> TextChoice:
        prompt = self._job.prompts[index // self._job.num_choices]
        before = prompt.text if self._echo and part.echoed is not None else ""
        choice = TextChoice(
            index=index,
            text=before + part.text,
            logprobs=self._logprobs(prompt, part),
            finish_reason=part.finish,
        )
        if self._with_ids:
            choice.token_ids = part.token_ids
            if part.echoed is not None:
                choice.prompt_token_ids = prompt.token_ids
        return choice

    def _logprobs(self, prompt: Prompt, part: _Part) -> TextLogprobs | None:
        if self._writer is None:
            return None
        lists = self._writer.to_lists(part.tokens, len(prompt.text) if self._echo else 0)
        scores = part.echoed.prompt_logprobs if part.echoed is not None else None
        if scores is None:
            return lists
        return join_lists(self._writer.prompt_lists(prompt.token_ids, scores), lists)


def _joined(index: int, deltas: list[Delta]) -> _Part:
    own = [delta for delta in deltas if delta.index == index]
    return _Part(
        "".join(delta.text for delta in own),
        [token for delta in own for token in delta.tokens],
        [token_id for delta in own for token_id in delta.token_ids],
        own[-1].finish,
        own[0],
    )
