"""Owns the shapes of chat answers: deltas to events, and the same deltas to a whole answer.

Knows neither how a prompt came about nor how a delta did.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.server.choice import Delta, PlacedCall, PlacedToken
from firstlight.server.context import AppContext
from firstlight.server.generation import Job
from firstlight.server.logprob_text import LogprobWriter
from firstlight.server.request_models import ChatRequest
from firstlight.server.response_models import (
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
    Usage,
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
        """The role before a choice's first part, then what came, then why it ended.

        Reasoning, content and calls come in events of their own, in this order.
        """
        if delta.index not in self._greeted:
            self._greeted.add(delta.index)
            yield self._chunk(delta.index, ChatDelta(role="assistant", content=""), first=True)
        for place, part in enumerate(self._parts(delta)):
            chunk = self._chunk(delta.index, part, source=delta)
            if self._with_ids and place == 0:
                chunk.choices[0].token_ids = delta.token_ids
            yield chunk
        if delta.finish is not None:
            yield self._chunk(delta.index, ChatDelta(), finish=delta)

    def _parts(self, delta: Delta) -> Iterator[ChatDelta]:
        if delta.reasoning:
            yield ChatDelta(reasoning_content=delta.reasoning)
        bare = not (delta.reasoning or delta.calls)
        if delta.text or delta.tokens or (bare and self._with_ids and delta.token_ids):
            yield ChatDelta(content=delta.text)
        if delta.calls:
            yield ChatDelta(tool_calls=[_call_delta(call) for call in delta.calls])

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
        choice = ChatChoice(
            index=index,
            message=_message(own),
            logprobs=self._logprobs([token for delta in own for token in delta.tokens]),
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
        scored = source is not None and added.content is not None
        choice = ChatChunkChoice(
            index=index,
            delta=added,
            logprobs=self._logprobs(source.tokens) if source and scored else None,
            finish_reason=None if finish is None else finish.finish,
        )
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


def _message(own: list[Delta]) -> ChatMessage:
    """The message of a choice; one that only calls tools has no content."""
    text = "".join(delta.text for delta in own)
    calls = [call for delta in own for call in delta.calls]
    message = ChatMessage(role="assistant", content=None if calls and not text else text)
    reasoning = ""
    for delta in own:
        reasoning = delta.reasoning if delta.reasoning_was_content else reasoning + delta.reasoning
    if reasoning:
        message.reasoning_content = reasoning
    if calls:
        message.tool_calls = [
            ToolCall(id=call.id, type="function", function=_function(call)) for call in calls
        ]
    return message


def _call_delta(call: PlacedCall) -> CallDelta:
    return CallDelta(index=call.index, id=call.id, type="function", function=_function(call))


def _function(call: PlacedCall) -> CalledFunction:
    return CalledFunction(name=call.name, arguments=call.arguments)
