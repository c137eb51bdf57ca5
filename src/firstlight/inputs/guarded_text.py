"""Owns text whose characters carry the mark "a user wrote this" through a template's string work.
It knows nothing of templates, tokens or messages.

A marked character is stored as another one, its shadow, from a private-use range. Whatever joins,
cuts or copies the stored characters, by whatever route, keeps the mark. Everything that *looks* at
the text (comparison, search, split, case) is answered from what the user wrote.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

_QUERIES = [
    "startswith",
    "endswith",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
]
_CASES = ["upper", "lower", "capitalize", "title", "swapcase", "casefold"]
_WIDTHS = ["center", "ljust", "rjust", "zfill", "expandtabs"]


class Shadow(NamedTuple):
    """Which characters are marked, and by which characters each is stored.

    White space is never marked, so that trimming and splitting at it see it as it is.
    """

    to_shadow: Mapping[int, int]
    to_plain: Mapping[int, int]
    marks: re.Pattern[str]

    @classmethod
    def of(cls, characters: Collection[str], base: int) -> "Shadow":
        """Marks `characters` and their other cases with code points from `base` on."""
        cases = {c for char in characters for c in (char, char.lower(), char.upper())}
        points = sorted(ord(c) for c in cases if len(c) == 1 and not c.isspace())
        to_shadow = {point: base + index for index, point in enumerate(points)}
        last = base + max(len(points), 1) - 1
        return cls(
            to_shadow,
            {mark: point for point, mark in to_shadow.items()},
            re.compile(f"[{chr(base)}-{chr(last)}]"),
        )

    def guard(self, text: str) -> "GuardedText":
        """`text` with all its characters marked."""
        return GuardedText.stored(text.translate(self.to_shadow), self)

    def reveal(self, text: str) -> str:
        """What the user wrote: an ordinary string without marks."""
        if str.isascii(text):
            return str.__str__(text)
        return str.translate(text, self.to_plain)

    def has_marks(self, text: str) -> bool:
        """Whether any character of the stored text is marked."""
        return not str.isascii(text) and self.marks.search(text) is not None

    def wrap(self, value: Any) -> Any:
        """Gives stored text its looks back after plain string code handled it."""
        if type(value) is str and self.has_marks(value):
            return GuardedText.stored(value, self)
        return value

    def reveal_all(self, value: Any) -> Any:
        """`value` with every string in its lists and mappings revealed."""
        if isinstance(value, str):
            return self.reveal(value)
        if isinstance(value, Mapping):
            return {self.reveal_all(key): self.reveal_all(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.reveal_all(item) for item in value)
        return value

    def has_marks_inside(self, value: Any) -> bool:
        """Whether any string in `value`, its lists and mappings is marked."""
        if isinstance(value, str):
            return self.has_marks(value)
        if isinstance(value, Mapping):
            return any(self.has_marks_inside(item) for pair in value.items() for item in pair)
        return isinstance(value, (list, tuple)) and any(map(self.has_marks_inside, value))


class GuardedText(str):
    """A string stored with marks that answers as the string the user wrote."""

    __slots__ = ("_plain_text", "_shadow")
    _plain_text: str | None
    _shadow: Shadow

    @classmethod
    def stored(cls, text: str, shadow: Shadow) -> "GuardedText":
        """Takes text that already holds marks."""
        made = str.__new__(cls, text)
        made._shadow = shadow
        made._plain_text = None
        return made

    @property
    def _plain(self) -> str:
        if self._plain_text is None:
            self._plain_text = self._shadow.reveal(self)
        return self._plain_text

    def _cut(self, start: int, stop: int) -> str:
        cut: str = self._shadow.wrap(str.__getitem__(self, slice(start, stop)))
        return cut

    def _asked(self, value: Any) -> Any:
        return self._shadow.reveal_all(value)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._shadow.guard(repr(self._plain))

    def __hash__(self) -> int:
        return hash(self._plain)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._plain == self._shadow.reveal(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self._plain < self._shadow.reveal(other)

    def __le__(self, other: str) -> bool:
        return self._plain <= self._shadow.reveal(other)

    def __gt__(self, other: str) -> bool:
        return self._plain > self._shadow.reveal(other)

    def __ge__(self, other: str) -> bool:
        return self._plain >= self._shadow.reveal(other)

    def __contains__(self, part: object) -> bool:
        return self._asked(part) in self._plain

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        item: str = self._shadow.wrap(str.__getitem__(self, key))
        return item

    def __iter__(self) -> Iterator[str]:
        return (self._shadow.wrap(char) for char in str.__iter__(self))

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return GuardedText.stored("".join((self, other)), self._shadow)

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return GuardedText.stored("".join((other, self)), self._shadow)

    def __mul__(self, count: SupportsIndex) -> str:
        repeated: str = self._shadow.wrap(str.__mul__(self, count))
        return repeated

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        raise ValueError("a message's text cannot serve as a format")

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Refused: bytes could not carry the marks."""
        raise ValueError("a message's text cannot be turned into bytes")

    def format(self, *args: Any, **kwargs: Any) -> str:
        """Refused: the text is data, not a pattern."""
        raise ValueError("a message's text cannot serve as a format")

    format_map = format
    translate = format

    def strip(self, chars: str | None = None) -> str:
        """As str.strip, on what the user wrote."""
        return self._trim(str.strip, chars)

    def lstrip(self, chars: str | None = None) -> str:
        """As str.lstrip, on what the user wrote."""
        return self._trim(str.lstrip, chars)

    def rstrip(self, chars: str | None = None) -> str:
        """As str.rstrip, on what the user wrote."""
        return self._trim(str.rstrip, chars)

    def _trim(self, method: Callable[..., str], chars: str | None) -> str:
        if chars is not None:
            plain = self._shadow.reveal(chars)
            chars = plain + plain.translate(self._shadow.to_shadow)
        trimmed: str = self._shadow.wrap(method(self, chars))
        return trimmed

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As str.split, on what the user wrote."""
        return self._split(str.split, sep, maxsplit)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As str.rsplit, on what the user wrote."""
        return self._split(str.rsplit, sep, maxsplit)

    def _split(
        self, method: Callable[..., list[str]], sep: str | None, maxsplit: SupportsIndex
    ) -> list[str]:
        if sep is None:
            return [self._shadow.wrap(piece) for piece in method(self, None, maxsplit)]
        sep = self._shadow.reveal(sep)
        pieces, start = [], 0
        for piece in method(self._plain, sep, maxsplit):
            pieces.append(self._cut(start, start + len(piece)))
            start += len(piece) + len(sep)
        return pieces

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As str.splitlines."""
        return [self._shadow.wrap(line) for line in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        """As str.partition, on what the user wrote."""
        return self._partition(self._plain.partition(self._shadow.reveal(sep)))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """As str.rpartition, on what the user wrote."""
        return self._partition(self._plain.rpartition(self._shadow.reveal(sep)))

    def _partition(self, plain: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(plain[0]), len(plain[0]) + len(plain[1])
        return self._cut(0, first), self._cut(first, second), self._cut(second, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """As str.replace, on what the user wrote."""
        if not old:
            replaced: str = self._shadow.wrap(str.replace(self, "", new, count))
            return replaced
        joined: str = self._shadow.wrap(str.join(new, self.split(old, count)))
        return joined

    def removeprefix(self, prefix: str) -> str:
        """As str.removeprefix, on what the user wrote."""
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> str:
        """As str.removesuffix, on what the user wrote."""
        return self._cut(0, len(self) - len(suffix)) if self.endswith(suffix) else self

    def join(self, items: Any) -> str:
        """As str.join with this text between the items."""
        joined: str = self._shadow.wrap(str.join(self, items))
        return joined

    def _with_case(self, method: Callable[[str], str]) -> str:
        changed = method(self._plain)
        if len(changed) != len(self):
            return self._shadow.guard(changed)
        to_shadow = self._shadow.to_shadow
        stored = "".join(
            chr(to_shadow.get(ord(new), ord(new))) if mark != was else new
            for new, was, mark in zip(changed, self._plain, str.__iter__(self), strict=True)
        )
        recased: str = self._shadow.wrap(stored)
        return recased


def _query(name: str) -> Callable[..., Any]:
    def ask(self: GuardedText, *args: Any) -> Any:
        return getattr(self._plain, name)(*(self._asked(arg) for arg in args))

    return ask


def _case(name: str) -> Callable[..., Any]:
    def change(self: GuardedText) -> str:
        return self._with_case(getattr(str, name))

    return change


def _width(name: str) -> Callable[..., Any]:
    def widen(self: GuardedText, *args: Any) -> Any:
        return self._shadow.wrap(getattr(str, name)(self, *args))

    return widen


for _names, _make in ((_QUERIES, _query), (_CASES, _case), (_WIDTHS, _width)):
    for _name in _names:
        setattr(GuardedText, _name, _make(_name))
