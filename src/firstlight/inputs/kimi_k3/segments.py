"""Owns the elements Kimi K3 reads and writes, as segments that are tokenised each on its own.
It knows nothing of conversations.

An element is `<|open|>tag key="value"<|sep|> body <|close|>tag<|sep|>`.
"""

from collections.abc import Iterator
from typing import NamedTuple

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
IMAGE_PAD = "<|media_pad|>"
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


class Segment(NamedTuple):
    """A piece of a prompt. Only where `special` do control tokens in the text count."""

    text: str
    special: bool = False


def opened(tag: str, **attributes: str | int) -> Iterator[Segment]:
    """The begin of an element; each attribute is four segments."""
    yield Segment(OPEN, True)
    yield Segment(tag)
    for key, value in attributes.items():
        yield from (Segment(f" {key}"), Segment('="'))
        yield from plain(escape_attribute(str(value)))
        yield Segment('"')
    yield Segment(SEP, True)


def closed(tag: str) -> Iterator[Segment]:
    """The end of an element."""
    yield from (Segment(CLOSE, True), Segment(tag), Segment(SEP, True))


def message_end() -> Iterator[Segment]:
    """The end of a message."""
    yield from closed("message")
    yield Segment(END_OF_MESSAGE, True)


def plain(text: str) -> Iterator[Segment]:
    """Text as it is, in which nothing is a control token; no segment when it is empty."""
    if text:
        yield Segment(text)


def image(width: int, height: int) -> Segment:
    """The block of one image, `width` x `height` pixels as it came, with one pad token."""
    return Segment(
        f"<|media_begin|>image {width}x{height}<|media_content|>{IMAGE_PAD}<|media_end|>", True
    )


def escape_attribute(text: str) -> str:
    """An attribute's value as it is written."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(text: str) -> str:
    """What an attribute's written value stands for."""
    return text.replace("&quot;", '"').replace("&amp;", "&")
