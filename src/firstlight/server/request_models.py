"""Owns the request bodies of every endpoint, as the OpenAPI schema states them.

Knows types and bounds only, and neither the model nor the engine.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from firstlight.server.message_fields import Messages
from firstlight.server.request_fields import (
    MAX_LOGPROBS,
    PromptField,
    SamplingFields,
    StrictBody,
    TokenId,
)
from firstlight.server.tool_fields import ReasoningEffort, ResponseFormat, Tool, ToolChoice

TOOLS_NOTE = (
    "Shown to the model by its chat template. Calls are returned as tool_calls where this server "
    "knows the model's markup for them, and as plain content otherwise."
)
CHOICE_NOTE = (
    "none keeps the model from calling any. required and a named function hold the answer to a "
    "call, and need a model whose calls are returned as tool_calls."
)


class PromptFields(StrictBody):
    """What the prompt of a conversation is made from beside its messages."""

    tools: list[Tool] | None = Field(None, description=TOOLS_NOTE)
    tool_choice: ToolChoice | None = Field(None, description=CHOICE_NOTE)
    parallel_tool_calls: bool | None = Field(
        None, description="false allows one call an answer; on by default."
    )
    response_format: ResponseFormat | None = Field(
        None, description="JSON formats hold the answer to a grammar while it is generated."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For models that know it; none switches reasoning off."
    )
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="Variables for the model's chat template."
    )


class ChatRequest(SamplingFields, PromptFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Needs logprobs: true."
    )


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Left out: the rest of the context. 0 scores the prompt, with echo."
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: None = Field(None, description="Refused: only null is accepted.")
    suffix: None = Field(None, description="Refused: only null is accepted.")


class TokenizeRequest(PromptFields):
    """Body of POST /tokenize: either `text`, or `messages` as chat completions take them."""

    model: str | None = None
    text: str | None = None
    add_special_tokens: bool | None = Field(None, description="For text; on by default.")
    messages: Messages | None = None
    add_generation_prompt: bool | None = Field(None, description="For messages; on by default.")


class ReloadRequest(StrictBody):
    """Body of POST /weights/reload."""

    source: str | None = Field(
        None, min_length=1, max_length=4096, description="Left out: what is served now."
    )


class DetokenizeRequest(StrictBody):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="Off by default.")
