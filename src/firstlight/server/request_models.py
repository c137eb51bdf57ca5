"""Owns the request bodies of every endpoint, as the OpenAPI schema states them.

Knows types and bounds only, and neither the model nor the engine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from firstlight.server.request_fields import (
    MAX_LOGPROBS,
    Messages,
    PromptField,
    SamplingFields,
    StrictBody,
    TextFormat,
    TokenId,
    Tool,
)

TOOLS_NOTE = (
    "Shown to the model by its chat template. Calls the model writes are returned as plain content "
    "in its own markup: they are not parsed into tool_calls."
)


class TemplateFields(StrictBody):
    """What a chat template sees."""

    messages: Messages
    tools: list[Tool] | None = Field(None, description=TOOLS_NOTE)
    tool_choice: Literal["none", "auto"] | None = Field(
        None, description="none hides the tools from the model; other choices are refused."
    )
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="Variables for the model's chat template."
    )


class ChatRequest(SamplingFields, TemplateFields):
    """Body of POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Needs logprobs: true."
    )
    response_format: TextFormat | None = None


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


class TokenizeRequest(StrictBody):
    """Body of POST /tokenize: either `text`, or `messages` as chat completions take them."""

    model: str | None = None
    text: str | None = None
    add_special_tokens: bool | None = Field(None, description="For text; on by default.")
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = Field(None, description="For messages; on by default.")
    chat_template_kwargs: dict[str, JsonValue] | None = None


class DetokenizeRequest(StrictBody):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = Field(None, description="Off by default.")
