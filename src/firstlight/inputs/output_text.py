"""Owns turning one answer's token ids into text deltas, stop strings held back and cut off.
It knows nothing of requests, markup in the text, or why generation ends.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from firstlight.errors import RequestError
from firstlight.inputs.tokenizer import Tokenizer


class TokenPiece(NamedTuple):
    """One token for log-probabilities.

    `text_offset` is the number of characters of the answer before the text this token completed;
    `text` is empty for hidden tokens, `data` are the token's own bytes.
    """

    token_id: int
    text: str
    data: bytes
    text_offset: int


class Delta(NamedTuple):
    """What became final: `text` to send, the stop string met (if any), the tokens taken in."""

    text: str
    stopped: str | None
    tokens: tuple[TokenPiece, ...]


class StopFilter:
    """Lets a text through up to its first stop string, holding back what may become one.

    Of several stop strings the one whose end comes first counts, and of those the longest.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """Raises RequestError when a stop string is empty."""
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop must be a list of non-empty texts", "stop")
        self._stop = tuple(dict.fromkeys(stop))
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def take(self, text: str) -> str:
        """Adds text and gives what can no longer become part of a stop string."""
        if self.stopped is not None:
            return ""
        self._held += text
        found = min(
            ((place + len(stop), place, stop) for stop, place in self._places()), default=None
        )
        if found is not None:
            end, start, self.stopped = found
            sent, self._held = self._held[: end if self._include_stop else start], ""
            return sent
        kept = self._num_held()
        sent, self._held = (
            self._held[: len(self._held) - kept],
            self._held[len(self._held) - kept :],
        )
        return sent

    def finish(self) -> str:
        """Gives what was held back; no more text comes."""
        held, self._held = self._held, ""
        return held

    def _places(self) -> list[tuple[str, int]]:
        places = ((stop, self._held.find(stop)) for stop in self._stop)
        return [(stop, place) for stop, place in places if place >= 0]

    def _num_held(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class OutputText:
    """Assembles the text of one answer; the text is the same however the ids are chunked.

    Stop token ids and end tokens (by default the tokenizer's) never show in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        *,
        hidden_ids: Collection[int] | None = None,
    ) -> None:
        """Raises RequestError when a stop string is empty."""
        self._filter = StopFilter(stop, include_stop)
        self._tokenizer = tokenizer
        self._hidden = frozenset(tokenizer.eos_ids if hidden_ids is None else hidden_ids)
        self._stream = tokenizer.stream(skip_special=skip_special)
        self._num_decoded = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._filter.stopped

    def feed(self, ids: Iterable[int]) -> Delta:
        """Takes ids in; those after a stop string are ignored."""
        sent: list[str] = []
        tokens: list[TokenPiece] = []
        for token_id in ids:
            if self.stopped is not None:
                break
            offset = self._num_decoded
            text = "" if token_id in self._hidden else self._stream.push(token_id)
            tokens.append(TokenPiece(token_id, text, self._tokenizer.token_bytes(token_id), offset))
            sent.append(self._take(text))
        return Delta("".join(sent), self.stopped, tuple(tokens))

    def finish(self) -> Delta:
        """Gives what was held back; call it once, when no more ids come."""
        if self.stopped is not None:
            return Delta("", self.stopped, ())
        sent = self._take(self._stream.finish())
        return Delta(sent + self._filter.finish(), self.stopped, ())

    def _take(self, text: str) -> str:
        self._num_decoded += len(text)
        return self._filter.take(text)
