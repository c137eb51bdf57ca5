"""Owns what is checked of a chat request before it is rendered: tools, their choice, image parts.

Knows fields and whether the model takes images; raises RequestError naming the field to blame.
"""

from __future__ import annotations

from typing import NamedTuple

from firstlight.errors import RequestError
from firstlight.server.message_fields import ImagePart, Messages
from firstlight.server.request_models import PromptFields
from firstlight.server.tool_fields import ChosenTool


class FoundImage(NamedTuple):
    """The URL of an image part, and where in the request it stands."""

    url: str
    where: str


def check_tools(fields: PromptFields) -> None:
    """Tools have names of their own, and tool_choice asks for none that is not there."""
    names: set[str] = set()
    for index, tool in enumerate(fields.tools or []):
        if tool.function.name in names:
            raise RequestError(
                f"tools[{index}] is named {tool.function.name!r} like a tool before it; give each "
                "its own name",
                f"tools[{index}].function.name",
                "duplicate_tool",
            )
        names.add(tool.function.name)
    choice = fields.tool_choice
    if choice == "required" and not names:
        raise RequestError('tool_choice "required" needs tools', "tool_choice", "no_tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise RequestError(
            f"tool_choice names {choice.function.name[:200]!r}, which is not among the tools",
            "tool_choice",
            "unknown_tool",
        )


def check_abilities(fields: PromptFields, *, reads_calls: bool) -> None:
    """Refuses what a model whose calls are returned as plain text cannot be held to."""
    if reads_calls or not fields.tools:
        return
    if fields.tool_choice == "required" or isinstance(fields.tool_choice, ChosenTool):
        raise RequestError(
            "the markup of this model's tool calls is not known here, so a call cannot be "
            'enforced; use tool_choice "auto" or "none"',
            "tool_choice",
            "not_supported",
        )
    if fields.parallel_tool_calls is False:
        raise RequestError(
            "the markup of this model's tool calls is not known here, so their number cannot be "
            "limited; leave parallel_tool_calls out",
            "parallel_tool_calls",
            "not_supported",
        )


def image_parts(messages: Messages, *, takes_images: bool) -> list[FoundImage]:
    """The images of a conversation in order; for a model without eyes the first is an error."""
    found = []
    for index, message in enumerate(messages):
        if message.content is None or isinstance(message.content, str):
            continue
        for place, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                where = f"messages[{index}].content[{place}]"
                if not takes_images:
                    raise RequestError(
                        f"{where} is an image; this model takes text only", where, "no_images"
                    )
                found.append(FoundImage(part.url, f"{where}.image_url"))
    return found
