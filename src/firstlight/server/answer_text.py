"""Owns reading one choice's tokens: as plain text, or as the parts a model's markup tells apart.

Knows nothing of requests or engines. Stop strings are looked for in the content alone.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Protocol

from firstlight.inputs.answer_parser import AnswerDelta, AnswerParser, ToolCall
from firstlight.inputs.output_text import OutputText, StopFilter
from firstlight.inputs.tokenizer import Tokenizer


class AnswerPiece(NamedTuple):
    """What one token adds: `text` is content to send, `stopped` says that a stop string ended it.

    `offset` is the place in the content at which the token begins, None for one outside of it.
    `reasoning_was_content` says that the reasoning so far was none, and is in the content again.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    stopped: bool = False
    offset: int | None = None
    reasoning_was_content: bool = False


class AnswerText(Protocol):
    """Reads the tokens of one choice in order."""

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of the reasoning so far; None when reasoning is not told apart."""
        ...

    def feed(self, token_id: int) -> AnswerPiece:
        """Takes the next token; none may follow one that stopped the text."""
        ...

    def finish(self) -> AnswerPiece:
        """What was held back; call it once, when no more tokens come."""
        ...


class PlainAnswer:
    """An answer that is content and nothing else."""

    num_reasoning = None

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._text = OutputText(tokenizer, stop=stop)

    def feed(self, token_id: int) -> AnswerPiece:
        """Takes the next token."""
        found = self._text.feed([token_id])
        stopped = found.stopped is not None
        return AnswerPiece(found.text, stopped=stopped, offset=found.tokens[0].text_offset)

    def finish(self) -> AnswerPiece:
        """The rest of a stop string that did not come, and of a character."""
        return AnswerPiece(self._text.finish().text)


class ParsedAnswer:
    """An answer of a model whose markup tells reasoning, content and tool calls apart.

    Unless `several_calls`, those after the first are left out.
    """

    def __init__(
        self, parser: AnswerParser, stop: tuple[str, ...], *, several_calls: bool = True
    ) -> None:
        self._parser = parser
        self._calls_left = sys.maxsize if several_calls else 1
        self._filter = StopFilter(stop)
        self._num_content = 0
        self._num_reasoning = 0

    @property
    def num_reasoning(self) -> int:
        """Tokens up to the reasoning's end so far, the marker there included."""
        return self._num_reasoning

    def feed(self, token_id: int) -> AnswerPiece:
        """Takes the next token."""
        self._num_reasoning += self._parser.in_reasoning
        was_content = self._parser.in_content
        found = self._parser.feed(token_id)
        if found.reasoning_was_content:
            self._num_reasoning = 0
        # A token that completes no character adds no text, and belongs to the content all the same.
        is_content = bool(found.content) or (was_content and self._parser.in_content)
        return self._piece(found, self._num_content if is_content else None)

    def finish(self) -> AnswerPiece:
        """What was held back, of content too."""
        piece = self._piece(self._parser.finish(), None)
        return piece if piece.stopped else piece._replace(text=piece.text + self._filter.finish())

    def _piece(self, found: AnswerDelta, offset: int | None) -> AnswerPiece:
        self._num_content += len(found.content)
        text = self._filter.take(found.content)
        stopped = self._filter.stopped is not None
        calls = () if stopped else found.calls[: self._calls_left]
        self._calls_left -= len(calls)
        moved = found.reasoning_was_content
        return AnswerPiece(text, found.reasoning, calls, stopped, offset, moved)
