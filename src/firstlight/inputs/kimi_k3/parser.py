"""Owns reading Kimi K3's answers token by token: reasoning, response and calls told apart.
It knows nothing of requests; what makes up a call is the call reader's.

Markers count as token ids: a model that spells one out in ordinary tokens writes text. A marker
that turns out to be none is text too, and what cannot end an element here is text of the element.
"""

from collections.abc import Callable
from enum import Enum

from firstlight.inputs.answer_parser import AnswerDelta, ToolCall
from firstlight.inputs.element_markers import ElementMarkers
from firstlight.inputs.kimi_k3.call_reader import CallReader
from firstlight.inputs.kimi_k3.segments import END_OF_MESSAGE
from firstlight.inputs.tokenizer import Tokenizer


class _Place(Enum):
    """Where the next text belongs."""

    THINK = "think"
    RESPONSE = "response"
    BETWEEN = "between elements"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    JSON = "json"
    END = "end"


_CHANNELS = ("think", "response", "tools", "message")
_IN_TEXT = frozenset((begin, tag) for begin in ("open", "close") for tag in _CHANNELS)
_IN_TOOLS = _IN_TEXT | {("open", "call")}
_MARKERS = {
    _Place.THINK: _IN_TEXT,
    _Place.RESPONSE: _IN_TEXT,
    _Place.BETWEEN: _IN_TEXT,
    _Place.TOOLS: _IN_TOOLS,
    _Place.CALL: _IN_TOOLS | {("open", "argument"), ("open", "json"), ("close", "call")},
    _Place.ARGUMENT: frozenset({("close", "argument")}),
    _Place.JSON: frozenset({("close", "json"), ("close", "call")}),
}
_MAX_NAME_CHARACTERS = 2000  # with attributes; a marker that never ends must not hide an answer
_WITH_ATTRIBUTES = frozenset({"message", "call", "argument", "json"})


class KimiK3Parser:
    """Reads one answer. Held back is at most an unfinished marker or character.

    Text between elements is content, white space alone there is nothing. A call comes out whole
    when its closing marker has arrived; one without a name or without an end never does.
    """

    def __init__(
        self, tokenizer: Tokenizer, markers: ElementMarkers, *, thinking: bool, tools: bool
    ) -> None:
        self._stream = tokenizer.stream(skip_special=True)
        self._begins = {markers.open: "open", markers.close: "close"}
        self._sep = markers.sep
        self._ends = frozenset({*tokenizer.eos_ids, tokenizer.added_tokens.get(END_OF_MESSAGE, -1)})
        self._with_tools = tools
        self._place = _Place.THINK if thinking else _Place.RESPONSE
        self._begin: str | None = None  # a marker has begun: whether it opens or closes
        self._raw = ""  # its text with the marker tokens
        self._name = ""  # its text without them
        self._thought: list[str] = []
        self._gap = ""  # white space between elements, should text follow
        self._may_move = thinking  # nothing said yet that the text so far is no response
        self._call = CallReader()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._moved = False

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        return self._place is _Place.THINK

    @property
    def in_content(self) -> bool:
        """Whether the next text would be content; not so while a marker may have begun."""
        return self._place is _Place.RESPONSE and self._begin is None

    def feed(self, token_id: int) -> AnswerDelta:
        """What became certain with this token; never raises."""
        if token_id in self._ends:
            self._end()
        elif self._place is not _Place.END:
            self._take(token_id)
        return self._delta()

    def finish(self) -> AnswerDelta:
        """The last incomplete character; an unfinished marker is dropped."""
        self._end()
        return self._delta()

    def _take(self, token_id: int) -> None:
        begin = self._begins.get(token_id)
        if begin is not None:
            self._release(self._stream.finish())
            self._begin, self._raw, self._name = begin, self._stream.push(token_id), ""
        elif token_id == self._sep and self._begin is not None:
            self._finish_marker(self._stream.finish(), self._stream.push(token_id))
        else:
            self._take_text(self._stream.push(token_id))

    def _take_text(self, text: str) -> None:
        if self._begin is None:
            self._write(text)
            return
        self._raw += text
        self._name += text
        if not self._may_be_marker():
            self._release("")

    def _finish_marker(self, rest: str, sep: str) -> None:
        begin, name = self._begin, self._name + rest
        tag, _, attributes = name.partition(" ")
        is_whole = not attributes or (begin == "open" and tag in _WITH_ATTRIBUTES)
        if not is_whole or (begin, tag) not in _MARKERS[self._place]:
            self._release(rest + sep)
            return
        self._begin = None
        self._move(begin or "", tag, attributes)

    def _may_be_marker(self) -> bool:
        if len(self._name) > _MAX_NAME_CHARACTERS:
            return False
        for begin, tag in _MARKERS[self._place]:
            has_attributes = begin == "open" and tag in _WITH_ATTRIBUTES
            if begin != self._begin:
                continue
            if tag.startswith(self._name) or (has_attributes and self._name.startswith(f"{tag} ")):
                return True
        return False

    def _release(self, rest: str) -> None:
        """What began as a marker was none: its text, and `rest` behind it, is written."""
        held = self._raw if self._begin is not None else ""
        self._begin = None
        self._write(held + rest)

    def _move(self, begin: str, tag: str, attributes: str) -> None:
        steps: dict[str, Callable[[str, str], None]] = {
            "call": self._move_call,
            "argument": self._move_argument,
        }
        if tag in steps:
            steps[tag](begin, attributes)
        elif tag == "json":
            self._place = _Place.JSON if begin == "open" else _Place.CALL
        elif begin == "open":
            places = {"think": _Place.THINK, "response": _Place.RESPONSE, "tools": _Place.TOOLS}
            self._place = places.get(tag, self._place)
            if tag in ("response", "tools"):
                self._settle()
        elif tag == "message":
            self._place = _Place.END
        else:
            self._close_channel(tag)

    def _close_channel(self, tag: str) -> None:
        if tag == "response" and self._may_move:
            self._moved = True
            self._content += self._thought
        self._settle()
        self._place, self._gap = _Place.BETWEEN, ""

    def _settle(self) -> None:
        """From here on it is certain that what was given as reasoning was that."""
        self._may_move = False
        self._thought.clear()

    def _move_call(self, begin: str, attributes: str) -> None:
        if begin == "open":
            self._call = CallReader(attributes)
            self._place = _Place.CALL
            return
        call = self._call.finish()
        if call is not None and self._with_tools:
            self._calls.append(call)
        self._place = _Place.TOOLS

    def _move_argument(self, begin: str, attributes: str) -> None:
        if begin == "open":
            self._call.open(attributes)
            self._place = _Place.ARGUMENT
        else:
            self._call.close()
            self._place = _Place.CALL

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._place is _Place.BETWEEN:
            self._gap += text
            if text.isspace():
                return
            text, self._place = self._gap, _Place.RESPONSE
        if self._place is _Place.THINK:
            self._reasoning.append(text)
            if self._may_move:
                self._thought.append(text)
        elif self._place is _Place.RESPONSE:
            self._content.append(text)
        elif self._place is _Place.ARGUMENT:
            self._call.write(text)

    def _end(self) -> None:
        self._take_text(self._stream.finish())
        self._begin = None
        self._place = _Place.END

    def _delta(self) -> AnswerDelta:
        delta = AnswerDelta(
            "".join(self._reasoning), "".join(self._content), tuple(self._calls), self._moved
        )
        self._reasoning, self._content, self._calls, self._moved = [], [], [], False
        return delta
