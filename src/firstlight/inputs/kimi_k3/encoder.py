"""Owns how Kimi K3 is shown a conversation: which segments, in which order, with which words.
It knows nothing of token ids, nor of what a request may ask for.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firstlight.errors import RequestError
from firstlight.inputs.chat_messages import IMAGE_TYPES
from firstlight.inputs.kimi_k3.segments import (
    IMAGE_PLACEHOLDER,
    Segment,
    closed,
    image,
    message_end,
    opened,
    plain,
)
from firstlight.inputs.kimi_k3.tool_results import (
    call_arguments,
    call_name,
    in_call_order,
    result_name,
)

EFFORTS = ("low", "high", "max")
_NO_FENCES = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)


@dataclass(frozen=True)
class EncoderOptions:
    """The switches of the format.

    `effort` None leaves the message about it out. `image_sizes` None leaves placeholders in place
    of images; otherwise every placeholder in a text takes an image too, so that texts of users
    must be cleaned of them before.
    """

    thinking: bool = True
    effort: str | None = "max"
    add_generation_prompt: bool = True
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None
    image_sizes: Sequence[tuple[int, int]] | None = None


def chat_segments(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: EncoderOptions,
) -> list[Segment]:
    """The segments of a conversation, without empty ones.

    Raises RequestError for an unknown effort, for tool calls or results that cannot be written,
    and when images and sizes do not count the same.
    """
    encoder = _Encoder(options)
    segments = [
        *_declared(tools, "# Tools\nHere are the available tools, described in JSONSchema."),
        *_effort(options),
        *encoder.messages(in_call_order(messages)),
        *_requests(options),
    ]
    if options.add_generation_prompt:
        segments += opened("message", role="assistant")
        segments += opened("think" if options.thinking else "response")
    encoder.check_images()
    return segments


class _Encoder:
    """Writes messages, handing out the images as it comes to them."""

    def __init__(self, options: EncoderOptions) -> None:
        self._thinking = options.thinking
        self._sizes = options.image_sizes
        self._num_images = 0

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Segment]:
        """The messages; those of a role the model does not know are left out."""
        calls: Sequence[Mapping[str, Any]] = ()
        index = 0
        for message in messages:
            role = message["role"]
            if role == "assistant":
                calls, index = message.get("tool_calls") or (), 0
                yield from self._message(message, self._assistant(message))
            elif role == "tool":
                index += 1
                name = result_name(message, calls, index)
                yield from opened("message", role="tool", tool=name, index=index)
                yield from self._content(message.get("content"))
                yield from message_end()
            elif role == "system" and message.get("tools"):
                yield from _declared(message["tools"], _NEW_TOOLS)
            elif role in ("user", "system"):
                yield from self._message(message, self._content(message.get("content")))

    def check_images(self) -> None:
        """Raises RequestError when there were fewer images than sizes."""
        if self._sizes is not None and self._num_images != len(self._sizes):
            raise RequestError(
                f"{len(self._sizes)} image sizes for {self._num_images} images", "messages"
            )

    def _message(self, message: Mapping[str, Any], body: Iterator[Segment]) -> Iterator[Segment]:
        named = {"name": message["name"]} if message.get("name") else {}
        yield from opened("message", role=message["role"], **named)
        yield from body
        yield from message_end()

    def _assistant(self, message: Mapping[str, Any]) -> Iterator[Segment]:
        if self._thinking:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            yield from opened("think")
            if str(reasoning).strip():
                yield from self._text(str(reasoning))
            yield from closed("think")
        yield from opened("response")
        yield from self._content(message.get("content"))
        yield from closed("response")
        if message.get("tool_calls"):
            yield from opened("tools")
            for index, call in enumerate(message["tool_calls"], start=1):
                yield from self._call(call, index)
            yield from closed("tools")

    def _call(self, call: Mapping[str, Any], index: int) -> Iterator[Segment]:
        arguments = call_arguments(call)
        yield from opened("call", tool=call_name(call), index=index)
        if arguments.unreadable is not None:
            yield from opened("json", type="object")
            yield from self._text(arguments.unreadable)
            yield from closed("json")
        for key, value in arguments.values.items():
            yield from opened("argument", key=key, type=json_type(value))
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield from self._text(written)
            yield from closed("argument")
        yield from closed("call")

    def _content(self, content: Any) -> Iterator[Segment]:
        if isinstance(content, str):
            yield from self._text(content)
            return
        for part in content or ():
            if part["type"] in IMAGE_TYPES:
                yield self._image()
            else:
                yield from self._text(part["text"])

    def _text(self, text: str) -> Iterator[Segment]:
        if self._sizes is None:
            yield from plain(text)
            return
        for index, piece in enumerate(text.split(IMAGE_PLACEHOLDER)):
            if index:
                yield self._image()
            yield from plain(piece)

    def _image(self) -> Segment:
        if self._sizes is None:
            return Segment(IMAGE_PLACEHOLDER, True)
        if self._num_images == len(self._sizes):
            raise RequestError("more image placeholders than images", "messages")
        self._num_images += 1
        return image(*self._sizes[self._num_images - 1])


def json_type(value: Any) -> str:
    """The `type` attribute of an argument with this value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _declared(tools: Any, words: str) -> Iterator[Segment]:
    if tools:
        yield from _system("tool-declare", f"{words}\n\n```json\n{_compact(tools)}\n```")


def _effort(options: EncoderOptions) -> Iterator[Segment]:
    if not options.thinking or options.effort is None:
        return
    if options.effort not in EFFORTS:
        raise RequestError(
            f"unsupported thinking effort {options.effort!r}; it must be {', '.join(EFFORTS)}",
            "reasoning_effort",
        )
    yield from _system(
        "thinking-effort",
        "`thinking_effort` guides on how much to think in your thinking channel (not including "
        "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={options.effort}`.",
    )


def _requests(options: EncoderOptions) -> Iterator[Segment]:
    """What is asked of the next message: calls or none, and a form of the response."""
    orders = {
        "required": "You MUST call tools in the next message.",
        "none": "You MUST NOT call any tools in the next message.",
    }
    choice = options.tool_choice
    if choice in orders:
        words = f"The system is invoked with `tool_choice={choice}`.\n{orders[choice]}"
        yield from _system("tool-choice", words)
    form = options.response_format or {}
    kind = form.get("type")
    if kind not in ("json_object", "json_schema"):
        return
    words = f"The system is invoked with `response_format={kind}`.\n{_NO_FENCES}"
    if kind == "json_schema":
        given = form.get("json_schema")
        if isinstance(given, Mapping):
            given = given.get("schema", given.get("json_schema", given))
        words += (
            f"\nThe JSON data must match the following schema:\n```json\n{_compact(given)}\n```"
        )
    yield from _system("response-format", words)


def _system(kind: str, words: str) -> Iterator[Segment]:
    yield from opened("message", role="system", type=kind)
    yield from plain(words)
    yield from message_end()


def _compact(value: Any) -> str:
    return json.dumps(_sorted(value), ensure_ascii=False, separators=(",", ":"))


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value
