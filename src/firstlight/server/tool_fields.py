"""Owns the fields by which a request says what the answer may be: tools, their choice, its format.

Knows types only; what contradicts other fields, or the model, is checked elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag

from firstlight.server.request_fields import StrictBody, by_type, text_or_object

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ToolFunction(StrictBody):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(StrictBody):
    """A tool the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(StrictBody):
    """The name of the function to call."""

    name: str


class ChosenTool(StrictBody):
    """The one tool the model has to call."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$text")]
    | Annotated[ChosenTool, Tag("$object")],
    Discriminator(text_or_object),
]


class TextFormat(StrictBody):
    """Plain text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictBody):
    """A schema with its name; the answer is held to it whether `strict` or not."""

    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    json_schema: dict[str, JsonValue] = Field({}, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictBody):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("$text")]
    | Annotated[JsonObjectFormat, Tag("$json_object")]
    | Annotated[JsonSchemaFormat, Tag("$json_schema")],
    Discriminator(
        by_type("text", "json_object", "json_schema"),
        custom_error_type="format_type",
        custom_error_message="the type must be text, json_object or json_schema",
    ),
]
