"""Owns how much work and memory one rendering of a template may take.
It knows nothing of messages or of what the template writes.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

MAX_CHARACTERS = 32 * 1024 * 1024
MAX_STEPS = 4_000_000
MAX_SECONDS = 20.0
MAX_WIDTH = 1_000_000
MAX_INTEGER_BITS = 4096
MAX_ITEMS = 4_000_000
_LONG_NUMBER = re.compile(r"\d{6,}")
_WIDENING = frozenset(
    [
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "format",
        "format_map",
        "indent",
        "wordwrap",
        "truncate",
        "batch",
        "slice",
        "replace",
        "join",
        "round",
    ]
)


@dataclass
class RenderBudget:
    """What one rendering has left; members start with `_` so that templates cannot reach them."""

    _now: datetime
    _steps: int = MAX_STEPS
    _deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def _spend(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateError(f"the chat template took more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise TemplateError(f"the chat template ran for more than {MAX_SECONDS:g} s")

    def _counted(self, items: Any) -> Iterator[Any]:
        for item in items:
            self._spend()
            yield item


def check_length(num_characters: int) -> None:
    """Raises TemplateError when a text would grow past the limit."""
    if num_characters > MAX_CHARACTERS:
        raise TemplateError(f"the chat template makes a text of {num_characters} characters")


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raises TemplateError when `left operator right` would make something huge."""
    if operator == "%" and isinstance(left, str):
        _check_pattern(left)
    elif operator == "**":
        if _bits(left) * abs(int(right)) > MAX_INTEGER_BITS:
            raise TemplateError("the chat template raises a number to too high a power")
    elif operator == "*":
        _check_product(left, right)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_size(left, len(left) + len(right))


def check_method(name: str, receiver: Any, args: Sequence[Any]) -> None:
    """Raises TemplateError when a string method or filter would make a huge text."""
    if name not in _WIDENING:
        return
    if any(isinstance(arg, int) and abs(arg) > MAX_WIDTH for arg in args):
        raise TemplateError(f"the chat template calls {name} with a number above {MAX_WIDTH}")
    if name in ("format", "format_map") and isinstance(receiver, str):
        _check_pattern(receiver)
    if name == "replace" and isinstance(receiver, str) and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        times = receiver.count(old) if len(new) > len(old) else 0
        check_length(len(receiver) + times * len(new))
    if name == "join":
        _check_join(receiver, args)


def _check_join(receiver: Any, args: Sequence[Any]) -> None:
    items, separator = (
        (receiver, args[:1]) if not isinstance(receiver, str) else (args[0], [receiver])
    )
    if hasattr(items, "__len__"):
        width = sum(len(text) for text in separator if isinstance(text, str))
        check_length(len(items) * width)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if _bits(left) + _bits(right) > MAX_INTEGER_BITS:
            raise TemplateError("the chat template multiplies numbers that are too large")
        return
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int):
            _check_size(sequence, len(sequence) * count)


def _check_size(sequence: Any, length: int) -> None:
    if isinstance(sequence, str):
        check_length(length)
    elif length > MAX_ITEMS:
        raise TemplateError(f"the chat template makes a list of {length} items")


def _check_pattern(pattern: str) -> None:
    if _LONG_NUMBER.search(pattern):
        raise TemplateError("the chat template formats with a width of six digits or more")


def _bits(value: Any) -> int:
    return abs(value).bit_length() if isinstance(value, int) else 64
