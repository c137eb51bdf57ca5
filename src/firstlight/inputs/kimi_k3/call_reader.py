"""Owns putting one tool call of Kimi K3 together from its attributes and typed arguments.
It knows nothing of tokens or markers.
"""

import json
import math
import re
from typing import Any

from firstlight.errors import RequestError
from firstlight.inputs.answer_parser import ToolCall
from firstlight.inputs.chat_messages import plain_value
from firstlight.inputs.kimi_k3.segments import unescape_attribute

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class CallReader:
    """Collects the arguments of one call; of two with the same key the last counts."""

    def __init__(self, attributes: str = "") -> None:
        self._name = _attributes(attributes).get("tool", "")
        self._arguments: dict[str, Any] = {}
        self._key: str | None = None
        self._type = ""
        self._value: list[str] = []

    def open(self, attributes: str) -> None:
        """Begins an argument; one without a key is dropped when it closes."""
        found = _attributes(attributes)
        self._key, self._type = found.get("key"), found.get("type", "string")
        self._value = []

    def write(self, text: str) -> None:
        """Adds to the value of the open argument."""
        self._value.append(text)

    def close(self) -> None:
        """Ends the open argument."""
        if self._key is not None:
            self._arguments[self._key] = _typed("".join(self._value), self._type)
        self._key = None

    def finish(self) -> ToolCall | None:
        """The call, or None when it has no name."""
        if not self._name:
            return None
        text = json.dumps(self._arguments, ensure_ascii=False)
        return ToolCall(self._name, text)


def _attributes(text: str) -> dict[str, str]:
    return {key: unescape_attribute(value) for key, value in _ATTRIBUTE.findall(text)}


def _typed(text: str, kind: str) -> Any:
    """The value of an argument: text as it is, other types read as JSON where that is possible.

    What is no JSON, or could not be written again as JSON, stays text.
    """
    if kind == "string":
        return text
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        value = plain_value(value, "argument")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError, RequestError):
        return text
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value
