"""Owns the question what the vendor's management library tells of driver, cards and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.platforms.find import named


def answer(words: Sequence[str]) -> Mapping[str, Any]:
    """Returns `driver`, `cards` and `links`; raises what the library raises."""
    stack = named(words[0]).stack
    if stack.read_cards is None:
        raise LookupError(f"{stack.name} has no library that tells of its cards")
    return stack.read_cards()
