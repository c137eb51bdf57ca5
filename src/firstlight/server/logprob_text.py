"""Owns how log-probabilities are written in answers, in the chat form and in the older list form.

Knows the tokenizer; nothing of how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from firstlight.inputs.tokenizer import Tokenizer
from firstlight.schedule.step import TokenLogprobs
from firstlight.server.choice import PlacedToken
from firstlight.server.response_models import (
    ChatLogprobs,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
)

SMALLEST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON does not have."""


class LogprobWriter:
    """Writes tokens and log-probabilities; `num_top` alternatives at most."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._special = {token_id: text for text, token_id in tokenizer.specials.items()}

    def to_chat(self, tokens: Iterable[PlacedToken]) -> ChatLogprobs:
        """The chat form. A control token has no bytes, because it adds nothing to the text."""
        return ChatLogprobs(content=[self._chat_token(token.logprobs) for token in tokens])

    def to_lists(self, tokens: Sequence[PlacedToken], shift: int) -> TextLogprobs:
        """The list form; offsets count from `shift`, the length of an echoed prompt."""
        return TextLogprobs(
            tokens=[self._name(token.logprobs.token_id) for token in tokens],
            token_logprobs=[_finite(token.logprobs.logprob) for token in tokens],
            top_logprobs=[self._top_map(token.logprobs) for token in tokens],
            text_offset=[token.offset + shift for token in tokens],
        )

    def prompt_lists(
        self, prompt_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
    ) -> TextLogprobs:
        """The list form of a prompt's tokens; the first token has no log-probability."""
        stream = self._tokenizer.stream(skip_special=False, at_start=True)
        offset, offsets = 0, []
        for token_id in prompt_ids:
            offsets.append(offset)
            offset += len(stream.push(token_id))
        return TextLogprobs(
            tokens=[self._name(token_id) for token_id in prompt_ids],
            token_logprobs=[None if score is None else _finite(score.logprob) for score in scores],
            top_logprobs=[None if score is None else self._top_map(score) for score in scores],
            text_offset=offsets,
        )

    def _chat_token(self, found: TokenLogprobs) -> TokenLogprob:
        top = [self._chat_top(token_id, value) for token_id, value in found.top[: self._num_top]]
        plain = self._chat_top(found.token_id, found.logprob)
        return TokenLogprob(
            token=plain.token, bytes=plain.bytes, logprob=plain.logprob, top_logprobs=top
        )

    def _chat_top(self, token_id: int, value: float) -> TopLogprob:
        special = self._special.get(token_id)
        if special is not None:
            return TopLogprob(token=special, bytes=None, logprob=_finite(value))
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        return TopLogprob(token=text, bytes=list(raw), logprob=_finite(value))

    def _top_map(self, found: TokenLogprobs) -> dict[str, float]:
        top = {
            self._name(token_id): _finite(value) for token_id, value in found.top[: self._num_top]
        }
        return top | {self._name(found.token_id): _finite(found.logprob)}

    def _name(self, token_id: int) -> str:
        """The token's text; one that is no whole text is written as `bytes:` and its bytes."""
        special = self._special.get(token_id)
        if special is not None:
            return special
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def join_lists(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """Puts the lists of two texts one behind the other."""
    return TextLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _finite(value: float) -> float:
    return max(value, SMALLEST)
