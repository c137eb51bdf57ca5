"""Owns turning a request's messages and tools into the plain values a chat template reads.
It knows nothing of templates' languages, tokens or control strings.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from firstlight.errors import RequestError

MAX_DEPTH = 64
IMAGE_TYPES = ("image_url", "image")
KNOWN_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"}
)
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def prepared_messages(
    messages: Sequence[Mapping[str, Any]], *, takes_images: bool = False
) -> list[dict[str, Any]]:
    """Checks the messages and copies them into plain dictionaries.

    Parts of a content are texts and, with `takes_images`, images of type image or image_url. Keys
    without a value are dropped, reasoning is put under the names templates read, and the JSON text
    of tool call arguments becomes an object. Raises RequestError naming the field.
    """
    if isinstance(messages, (str, Mapping)) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    kinds = ("text", *IMAGE_TYPES) if takes_images else ("text",)
    return [_message(message, f"messages[{i}]", kinds) for i, message in enumerate(messages)]


def num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many image parts prepared messages hold."""
    parts = (part for message in messages for part in _parts(message))
    return sum(part["type"] in IMAGE_TYPES for part in parts)


def function_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool or a call says of its function; clients write it with or without a frame."""
    function = value.get("function", value)
    return function if isinstance(function, Mapping) else {}


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """Copies JSON-like data; anything else, or too deep a nesting, is a RequestError."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} levels deep", where)
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {
            _key(key, where): plain_value(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where} is a {type(value).__name__}, not JSON data", where)


def fitted_content(message: Mapping[str, Any], *, takes_text: bool, takes_parts: bool) -> Any:
    """The message's content in a form the template reads: text, or a list of text parts."""
    content = message.get("content")
    if isinstance(content, str) and not takes_text and takes_parts:
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        texts = [part["text"] for part in content]
        if len(texts) == 1 and takes_text:
            return texts[0]
        if not takes_parts:
            return "\n".join(texts)
    return content


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _message(message: Any, where: str, kinds: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is no object with role and content", where)
    copied = {k: v for k, v in plain_value(message, where).items() if v is not None}
    role = copied.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty text", f"{where}.role")
    _check_content(copied.get("content"), f"{where}.content", kinds)
    if "tool_calls" in copied:
        copied["tool_calls"] = _tool_calls(copied["tool_calls"], f"{where}.tool_calls")
    reasoning = next((copied[n] for n in _REASONING_NAMES if n in copied), None)
    if reasoning is not None:
        copied = {"thinking": reasoning, **copied, "reasoning_content": reasoning}
    return copied


def _check_content(content: Any, where: str, kinds: Collection[str]) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts", where)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        place = f"{where}[{index}]"
        if kind not in kinds:
            taken = "text and images" if len(kinds) > 1 else "text only"
            raise RequestError(f"{place} is of type {kind!r}; this model takes {taken}", place)
        if kind == "text" and not isinstance(part.get("text"), str):
            raise RequestError(f"{place}.text must be text", place)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict | None):
        raise RequestError(f"{where} must be an object with a function", where)
    if function is None or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _arguments(text: str) -> Any:
    """Arguments as an object; a text that is none stays as the model once wrote it."""
    try:
        value = plain_value(json.loads(text), "arguments")
    except (ValueError, RecursionError, RequestError):
        return text
    return value if isinstance(value, dict) else text


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{where} has the key {key!r}, which is no text", where)
    return str.__str__(key)
