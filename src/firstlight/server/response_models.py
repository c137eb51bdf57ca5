"""Owns the response bodies of every endpoint, in the shapes OpenAI's clients parse.

Knows only shapes; written here because importing a client library for them would double start-up.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishText = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """A JSON object this server writes; optional fields that were not set are left out."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    """What was wrong; `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class ErrorBody(Answer):
    """The body of every answer with an error status."""

    error: ErrorDetail


class PromptDetails(Answer):
    """Parts of the prompt's token count."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Parts of the generated token count."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts; a prompt counts once however many choices it has.

    `completion_tokens_details` is there for models that reason.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class TopLogprob(Answer):
    """One alternative; `bytes` is null for a control token, which has no text."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    """One token of the text; the bytes of all of them join to the text, the last may exceed it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of the tokens of a choice's content."""

    content: list[TokenLogprob]


class CalledFunction(Answer):
    """The function of a call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call the model makes; its id goes with the tool's answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CallDelta(ToolCall):
    """A call in an event of a stream, whole; `index` counts the calls of the choice."""

    index: int


class ChatMessage(Answer):
    """What the model said; `content` is null when it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishText
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ChatDelta(Answer):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Answer):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishText | None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(Answer):
    """Log-probabilities in four lists of one length; offsets count characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    """One choice of a text completion, whole or one chunk's part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishText | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(Answer):
    """A text completion, whole or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["firstlight"]
    max_model_len: int


class ModelList(Answer):
    """The models served here."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    """Token ids of a text or of rendered messages."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Answer):
    """The text of token ids."""

    text: str


class Health(Answer):
    """Whether the engine makes progress; `problem` says what is wrong."""

    healthy: bool
    problem: str | None
    heartbeat_age_seconds: float | None
    stalled_seconds: float


class Ready(Answer):
    """Whether requests are served; otherwise the phase start-up is in."""

    ready: bool
    draining: bool
    phase: str | None
    detail: str | None
    progress: int
    failure: str | None


class StartupPhase(Answer):
    """One phase in seconds since process start; `ended` is null while it runs."""

    name: str
    parent: str
    detail: str
    began: float
    ended: float | None


class Startup(Answer):
    """The timeline of the start and what the engine found out on the way."""

    ready: bool
    phases: list[StartupPhase]
    facts: dict[str, str | int | float]


class Version(Answer):
    """The version of firstlight."""

    version: str


class DamagedWeights(Answer):
    """Weights of one rank that are not as they were loaded: a run of the tensor, `granules` pieces
    of the axis it is cut along from number `granule` on."""

    rank: int
    unit: str
    tensor: str
    expert: int | None
    granule: int
    granules: int


class RankWeights(Answer):
    """What one rank compared."""

    rank: int
    num_bytes: int
    damages: list[DamagedWeights]


class WeightsChecked(Answer):
    """Whether all weights in memory are those that were loaded."""

    intact: bool
    seconds: float
    ranks: list[RankWeights]


class WeightsReloaded(Answer):
    """The weights served from now on."""

    source_digest: str
    known_answers: str
    seconds: float
