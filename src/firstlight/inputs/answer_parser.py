"""Owns what a model's answer is made of: reasoning, content and tool calls, as they come in.
It knows no markup; each chat format has its own parser.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class ToolCall(NamedTuple):
    """A call the model asks for; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class AnswerDelta(NamedTuple):
    """What became certain with one token.

    `reasoning_was_content` says that the model never closed its reasoning but ended a response:
    what was given as reasoning so far was the answer, and `content` holds it once more.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning_was_content: bool = False


class Answer(NamedTuple):
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerParser(Protocol):
    """Takes one answer's token ids in, in order, and says what each adds to which part."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        ...

    @property
    def in_content(self) -> bool:
        """Whether the next text would be content; not so while a marker may have begun."""
        ...

    def feed(self, token_id: int) -> AnswerDelta:
        """What became certain with this token; never raises."""
        ...

    def finish(self) -> AnswerDelta:
        """What is left when no more tokens come; call it once."""
        ...


def whole_answer(deltas: Iterable[AnswerDelta]) -> Answer:
    """The answer the deltas of one parser add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.reasoning_was_content:
            reasoning.clear()
        reasoning.append(delta.reasoning)
        content.append(delta.content)
        calls += delta.calls
    return Answer("".join(reasoning), "".join(content), tuple(calls))
