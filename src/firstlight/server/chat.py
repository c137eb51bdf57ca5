"""Owns chat completions: messages to a prompt, and deltas to the shapes of chat answers.

Knows the chat format and the shapes; nothing of connections or of how tokens are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import msgspec

from firstlight.errors import RequestError
from firstlight.inputs.chat_format import RenderedPrompt
from firstlight.server.choice import Delta, PlacedToken
from firstlight.server.context import AppContext
from firstlight.server.generation import Job, Prompt
from firstlight.server.logprob_text import LogprobWriter
from firstlight.server.request_fields import Messages, Tool
from firstlight.server.request_models import ChatRequest
from firstlight.server.response_models import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from firstlight.server.sampling import stop_texts, to_sampling, with_length


async def render_chat(
    context: AppContext,
    messages: Messages,
    *,
    tools: list[Tool] | None = None,
    add_generation_prompt: bool = True,
    kwargs: Mapping[str, object] | None = None,
) -> RenderedPrompt:
    """Renders messages with the model's template, in a thread: a long prompt takes seconds.

    Raises RequestError when the model has no template or the template refuses the messages.
    """
    if context.chat_format is None:
        raise RequestError(
            "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
        )
    return await asyncio.to_thread(
        context.chat_format.render,
        [message.model_dump(exclude_unset=True) for message in messages],
        tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
        kwargs=kwargs,
    )


async def to_chat_job(request: ChatRequest, context: AppContext, completion_id: str) -> Job:
    """Checks a chat request and turns it into work for the engine; raises RequestError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    asked = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(asked) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; send one of them", "max_tokens"
        )
    params = to_sampling(request, context)
    prompt = await render_chat(
        context,
        request.messages,
        tools=request.tools if request.tool_choice != "none" else None,
        kwargs=request.chat_template_kwargs,
    )
    params = with_length(params, len(prompt.token_ids), next(iter(asked), None), context)
    if request.logprobs:
        params = msgspec.structs.replace(params, logprobs=request.top_logprobs or 0)
    return Job(
        completion_id=completion_id,
        prompts=(Prompt(prompt.token_ids, params),),
        num_choices=request.n or 1,
        stop=stop_texts(request),
        seed=request.seed,
    )


class ChatShape:
    """Writes the answers to one chat request."""

    def __init__(
        self, request: ChatRequest, job: Job, *, context: AppContext, created: int
    ) -> None:
        self._created = created
        self._model = request.model
        self._job = job
        self._writer = (
            LogprobWriter(context.tokenizer, request.top_logprobs or 0)
            if request.logprobs
            else None
        )
        self._with_ids = bool(request.return_token_ids)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._greeted: set[int] = set()

    def chunks(self, delta: Delta) -> Iterator[ChatChunk]:
        """The role before a choice's first text, then what came, then why it ended."""
        if delta.index not in self._greeted:
            self._greeted.add(delta.index)
            yield self._chunk(delta.index, ChatDelta(role="assistant", content=""), first=True)
        if delta.text or delta.tokens or (self._with_ids and delta.token_ids):
            yield self._chunk(delta.index, ChatDelta(content=delta.text), source=delta)
        if delta.finish is not None:
            yield self._chunk(delta.index, ChatDelta(), finish=delta)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last event before the end, if it was asked for."""
        return ChatChunk(
            id=self._job.completion_id,
            created=self._created,
            model=self._model,
            object="chat.completion.chunk",
            choices=[],
            usage=usage,
        )

    def whole(self, deltas: list[Delta], usage: Usage) -> ChatCompletion:
        """The whole answer, made of the same deltas a stream is made of."""
        answer = ChatCompletion(
            id=self._job.completion_id,
            created=self._created,
            model=self._model,
            object="chat.completion",
            choices=[self._choice(index, deltas) for index in range(self._job.num_choices)],
            usage=usage,
        )
        if self._with_ids:
            answer.prompt_token_ids = self._job.prompts[0].token_ids
        return answer

    def _choice(self, index: int, deltas: list[Delta]) -> ChatChoice:
        own = [delta for delta in deltas if delta.index == index]
        finish = own[-1].finish
        assert finish is not None, f"choice {index} has not finished"
        tokens = [token for delta in own for token in delta.tokens]
        choice = ChatChoice(
            index=index,
            message=ChatMessage(role="assistant", content="".join(delta.text for delta in own)),
            logprobs=self._logprobs(tokens),
            finish_reason=finish,
        )
        if self._with_ids:
            choice.token_ids = [token_id for delta in own for token_id in delta.token_ids]
        return choice

    def _logprobs(self, tokens: list[PlacedToken]) -> ChatLogprobs | None:
        return None if self._writer is None else self._writer.to_chat(tokens)

    def _chunk(
        self,
        index: int,
        added: ChatDelta,
        *,
        source: Delta | None = None,
        finish: Delta | None = None,
        first: bool = False,
    ) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index,
            delta=added,
            logprobs=None if source is None else self._logprobs(source.tokens),
            finish_reason=None if finish is None else finish.finish,
        )
        if self._with_ids and source is not None:
            choice.token_ids = source.token_ids
        chunk = ChatChunk(
            id=self._job.completion_id,
            created=self._created,
            model=self._model,
            object="chat.completion.chunk",
            choices=[choice],
        )
        if self._with_usage:
            chunk.usage = None
        if self._with_ids and first:
            chunk.prompt_token_ids = self._job.prompts[0].token_ids
        return chunk
