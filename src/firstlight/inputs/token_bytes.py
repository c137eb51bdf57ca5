"""Owns which bytes a token stands for and how bytes become text piece by piece.
It knows nothing of how text becomes tokens.
"""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from firstlight.errors import ConfigError
from firstlight.inputs.scored_pieces import SPACE_MARK

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SENTENCEPIECE_STEPS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


@dataclass(frozen=True)
class ByteRule:
    """How token strings turn into bytes.

    `strips_start` is how many leading spaces the start of a text loses; `strips_first_token` says
    that the first token loses all its space marks instead.
    """

    to_bytes: Callable[[str], bytes]
    strips_start: int = 0
    strips_first_token: bool = False


def byte_rule(decoder: Mapping[str, Any] | None, origin: str) -> ByteRule:
    """The rule for the `decoder` of a tokenizer.json; `origin` names the file in messages.

    Raises ConfigError for a decoder that is neither byte-level nor sentencepiece.
    """
    steps = list(_flatten(decoder))
    kinds = {str(step.get("type")) for step in steps}
    if kinds == {"ByteLevel"}:
        alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}
        return ByteRule(lambda token: _byte_level(token, alphabet))
    if not kinds or not kinds <= _SENTENCEPIECE_STEPS or not _only_marks_replaced(steps):
        raise ConfigError(
            f"{origin}: decoder {sorted(kinds) or 'null'} is neither byte-level nor sentencepiece; "
            "its tokens cannot be turned into bytes one by one"
        )
    falls_back = "ByteFallback" in kinds
    metaspace = next((step for step in steps if step["type"] == "Metaspace"), None)
    strip = next((step for step in steps if step["type"] == "Strip"), {})
    return ByteRule(
        lambda token: _sentencepiece(token, falls_back),
        strips_start=int(strip.get("start", 0)) if strip.get("content") == " " else 0,
        strips_first_token=metaspace is not None and metaspace.get("prepend_scheme") != "never",
    )


def byte_alphabet() -> str:
    """The 256 printable characters byte-level vocabularies write bytes with, by byte value.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on.
    """
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in kept else next(moved)) for byte in range(256))


@dataclass
class TextStream:
    """Turns a stream of token bytes into text and never gives half a character.

    Bytes that are no UTF-8 become replacement characters as soon as that is certain, a character
    still incomplete only in `finish`.
    """

    rule: ByteRule
    at_start: bool = False
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _stripped: int = 0

    def push(self, token: str) -> str:
        """The text that became certain with `token`, which may be empty."""
        if self.at_start and self.rule.strips_first_token:
            token = token.replace(SPACE_MARK, "")
            self.at_start = False
        return self._strip(self._decoder.decode(self.rule.to_bytes(token)))

    def finish(self) -> str:
        """The replacement character of a last incomplete character, or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self.at_start and text:
            if text[0] != " " or self._stripped >= self.rule.strips_start:
                self.at_start = False
            else:
                text, self._stripped = text[1:], self._stripped + 1
        return text


def _flatten(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _flatten(step)
    else:
        yield decoder


def _only_marks_replaced(steps: list[Mapping[str, Any]]) -> bool:
    return all(
        step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
        for step in steps
        if step["type"] == "Replace"
    )


def _byte_level(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _sentencepiece(token: str, falls_back: bool) -> bytes:
    match = _BYTE_PIECE.match(token) if falls_back else None
    if match is not None:
        return bytes([int(match.group(1), 16)])
    return token.replace(SPACE_MARK, " ").encode("utf-8")
