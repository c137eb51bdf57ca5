"""Owns the messages of a conversation as request bodies hold them: roles, parts, earlier calls.

Knows types only; whether the model takes an image, a role or a tool is checked elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from firstlight.server.request_fields import StrictBody, by_type, text_or_list, text_or_object


class TextPart(StrictBody):
    """One text part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(StrictBody):
    """Where an image is: a data URL, or an http(s) URL where this server may fetch it."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = Field(None, description="Accepted and ignored.")


class ImagePart(StrictBody):
    """One image of a message, for models that take images."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Field(min_length=1), Tag("$text")] | Annotated[ImageUrl, Tag("$object")],
        Discriminator(text_or_object),
    ]

    @property
    def url(self) -> str:
        """Where the image is, in whichever form it was given."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


Part = Annotated[
    Annotated[TextPart, Tag("$text")] | Annotated[ImagePart, Tag("$image_url")],
    Discriminator(
        by_type("text", "image_url"),
        custom_error_type="part_type",
        custom_error_message="a part must be of type text or image_url",
    ),
]
Content = Annotated[
    Annotated[str, Tag("$text")] | Annotated[list[Part], Tag("$list")],
    Discriminator(text_or_list),
]


class CalledFunction(StrictBody):
    """The function of an earlier tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(StrictBody):
    """A tool call an assistant message made earlier."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class InstructionMessage(StrictBody):
    """Instructions of the operator."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(StrictBody):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(StrictBody):
    """What the model said earlier; the fields that are always null are those clients send back."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="Models that reason want it back.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    annotations: list[JsonValue] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(StrictBody):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages = Annotated[list[Message], Field(min_length=1)]


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """The messages as chat formats read them: what was not sent is left out, reasoning has one
    name, and an image part holds its URL alone.
    """
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_unset=True)
    reasoning = plain.pop("reasoning", None)
    if reasoning is not None and plain.get("reasoning_content") is None:
        plain["reasoning_content"] = reasoning
    return plain
