"""Owns the parts request bodies are built from: types every body shares, sampling, prompts.

Knows types and bounds only; what depends on the model or on other fields is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PlainValidator,
    Tag,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

MAX_CACHE_NAME = 1024
MAX_CHOICES = 128
MAX_STOP = 16
MAX_LOGPROBS = 20


class StrictBody(BaseModel):
    """A JSON object: all fields are known, types are exact, numbers are finite."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def text_or_list(value: object) -> str:
    """Names the branch of a field that is either a string or a list, so that errors stay short."""
    return "$list" if isinstance(value, list) else "$text"


def text_or_object(value: object) -> str:
    """Names the branch of a field that is either a string or an object."""
    return "$object" if isinstance(value, (dict, StrictBody)) else "$text"


def by_type(*known: str) -> Callable[[object], str | None]:
    """Makes what names the branch of an object by its `type`; None, which is an error, for others
    than these.
    """

    def branch(value: object) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"${kind}" if kind in known else None

    return branch


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=4096)]
StopList = Annotated[list[StopText], Field(max_length=MAX_STOP)]
Stop = Annotated[
    Annotated[StopText, Tag("$text")] | Annotated[StopList, Tag("$list")],
    Discriminator(text_or_list),
]
BiasKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
BiasValue = Annotated[float, Field(ge=-100, le=100)]
Prompt = str | list[str] | list[int] | list[list[int]]


def check_prompt(value: object) -> Prompt:
    """Accepts the four forms of a prompt by exact types; one error whatever the length."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is str for item in value) or _is_ids(value):
            return value
        if all(type(item) is list and item and _is_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt",
        "must be a string, or a list that is not empty of strings, of token ids, or of lists of "
        "token ids",
    )


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in value)


_IDS_SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
}
PromptField = Annotated[
    Prompt,
    PlainValidator(check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]


class StreamOptions(StrictBody):
    """What a stream carries beside its deltas."""

    include_usage: bool | None = None


class SamplingFields(StrictBody):
    """Fields both completion endpoints share. A field left out takes the model's own default."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="0 and -1 consider every token."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="Choice 0 uses it as it is, further choices use seeds derived from it."
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="No end token ends the text earlier; a stop string still does."
    )
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[BiasKey, BiasValue], Field(max_length=4096)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        None, description="Adds prompt_token_ids and token_ids to the choices."
    )
    prompt_cache_key: Annotated[str, Field(max_length=MAX_CACHE_NAME)] | None = Field(
        None,
        description="Requests with the same beginning follow: its state is kept where they can go "
        "on from it. Separates nothing, and changes no answer.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_NAME)] | None = Field(
        None, description="Only requests with the same salt reuse each other's computed text."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None,
        description="Smaller numbers start first and yield last; 0 if left out. Changes no answer.",
    )
    user: str | None = Field(None, description="Accepted and ignored.")
    metadata: dict[str, JsonValue] | None = Field(None, description="Accepted and ignored.")
    store: bool | None = Field(None, description="Accepted and ignored.")
