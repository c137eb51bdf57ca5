"""Owns one choice while it is generated: its parts, which tokens belong to them, when it ends.

Knows neither HTTP nor the engine's queue; it is fed the engine's outputs one by one.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from firstlight.engine.messages import Output
from firstlight.errors import CheckFailed
from firstlight.inputs.answer_parser import ToolCall
from firstlight.schedule.request import FinishReason, SubmittedRequest
from firstlight.schedule.step import TokenLogprobs
from firstlight.server.answer_text import AnswerPiece, AnswerText
from firstlight.server.failures import ApiFailure
from firstlight.server.response_models import FinishText


class PlacedToken(NamedTuple):
    """A token's log-probabilities and the character of the choice's text at which it begins."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A tool call: its place among the choice's calls, its id, and JSON text as arguments."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What an output added to a choice; `text` is of its content.

    `tokens` are those of the content, `token_ids` all of them. `reasoning_was_content` takes back
    the reasoning so far: it is in the content once more. `prompt_logprobs` comes once, in the first
    delta, if asked for: one entry a prompt token, None for the first. `finish` is set in the last.
    """

    index: int
    text: str
    tokens: list[PlacedToken]
    token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishText | None = None
    reasoning: str = ""
    calls: tuple[PlacedCall, ...] = ()
    reasoning_was_content: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a client; what has parts has tokens."""
        return not (self.text or self.tokens or self.token_ids or self.finish)


class _Gathered:
    """What the tokens of one output add, piece by piece."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.stopped = self.reasoning_was_content = False

    def add(self, piece: AnswerPiece) -> None:
        self.text += piece.text
        if piece.reasoning_was_content:
            self.reasoning, self.reasoning_was_content = "", True
        self.reasoning += piece.reasoning
        self.calls += piece.calls
        self.stopped = piece.stopped


class Placement:
    """Finds which tokens a text is made of, though text lags behind tokens and may be cut.

    A token belongs to the text when the character it begins at does; until then it waits.
    """

    def __init__(self) -> None:
        self._num_emitted = 0
        self._waiting: deque[PlacedToken] = deque()

    def add(self, token: PlacedToken) -> None:
        """Takes the next token."""
        self._waiting.append(token)

    def release(self, num_characters: int, *, everything: bool) -> list[PlacedToken]:
        """Gives the tokens of the next characters of the text, or all that are left."""
        self._num_emitted += num_characters
        released = []
        while self._waiting and (everything or self._waiting[0].offset < self._num_emitted):
            released.append(self._waiting.popleft())
        return released


class Choice:
    """One choice of a request: feed it with `take` until `finish` is set."""

    def __init__(
        self,
        index: int,
        request: SubmittedRequest,
        answer: AnswerText,
    ) -> None:
        self.index = index
        self.request = request
        self.finish: FinishText | None = None
        self.num_generated = 0
        self.num_cached = 0
        self.first_at: float | None = None
        self._answer = answer
        self._num_calls = 0
        wants_logprobs = request.params.logprobs is not None
        self._placement = Placement() if wants_logprobs else None
        wants_scores = request.params.prompt_logprobs is not None
        self._scores: dict[int, TokenLogprobs] | None = {} if wants_scores else None

    def take(self, output: Output) -> Delta | None:
        """Takes an output of the engine and gives what it adds, None while there is nothing.

        Raises ApiFailure when the engine ended the request with an error or cancelled it.
        """
        self._check(output)
        self.num_cached = max(self.num_cached, output.num_cached)
        if output.prompt_logprobs is not None and self._scores is not None:
            first = output.prompt_logprobs.first
            self._scores |= dict(enumerate(output.prompt_logprobs.tokens, start=first))
        found = self._feed(output)
        if output.finish is not None and not found.stopped:
            found.add(self._answer.finish())
        calls = self._place_calls(found.calls)
        if found.stopped or output.finish is not None:
            self.finish = self._find_finish(found.stopped or output.finish is FinishReason.STOP)
        delta = Delta(
            self.index,
            found.text,
            self._released(len(found.text), found.stopped),
            found.token_ids,
            self._prompt_logprobs(found.token_ids),
            self.finish,
            found.reasoning,
            calls,
            found.reasoning_was_content,
        )
        return None if delta.is_empty else delta

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of the reasoning so far; None when this model's reasoning is not told apart."""
        return self._answer.num_reasoning

    def _find_finish(self, ended: bool) -> FinishText:
        if not ended:
            return "length"
        return "tool_calls" if self._num_calls else "stop"

    def _place_calls(self, calls: list[ToolCall]) -> tuple[PlacedCall, ...]:
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return tuple(
            PlacedCall(index, f"call_{uuid.uuid4().hex}", call.name, call.arguments)
            for index, call in enumerate(calls, start=first)
        )

    def _feed(self, output: Output) -> _Gathered:
        """Gives what the tokens add, up to one that completes a stop string."""
        found, ids = _Gathered(), output.token_ids
        if ids and self.first_at is None:
            self.first_at = time.monotonic()
        shown = len(ids)
        if output.finish is FinishReason.STOP and ids[-1:] and self._is_end(ids[-1]):
            shown -= 1  # the end token was generated, and counts, but is not part of the text
        for position in range(shown):
            piece = self._answer.feed(ids[position])
            found.add(piece)
            if self._placement is not None and piece.offset is not None:
                self._placement.add(PlacedToken(self._logprobs(output, position), piece.offset))
            if found.stopped:
                ids = ids[: position + 1]
                break
        self.num_generated += len(ids)
        found.token_ids = ids
        return found

    def _released(self, num_characters: int, stopped: bool) -> list[PlacedToken]:
        if self._placement is None:
            return []
        everything = self.finish is not None and not stopped
        return self._placement.release(num_characters, everything=everything)

    def _prompt_logprobs(self, used: list[int]) -> list[TokenLogprobs | None] | None:
        if self._scores is None or not (used or self.finish):
            return None
        scores, self._scores = self._scores, None
        num_prompt = len(self.request.prompt_ids)
        missing = [at for at in range(1, num_prompt) if at not in scores]
        if missing:
            raise CheckFailed(
                f"the engine gave no log-probabilities for {len(missing)} of {num_prompt} prompt "
                f"tokens, the first at position {missing[0]}"
            )
        return [None, *(scores[at] for at in range(1, num_prompt))]

    def _logprobs(self, output: Output, position: int) -> TokenLogprobs:
        if output.logprobs is None or len(output.logprobs) != len(output.token_ids):
            raise CheckFailed("the engine gave tokens without their log-probabilities")
        return output.logprobs[position]

    def _is_end(self, token_id: int) -> bool:
        return token_id in self.request.params.end_token_ids

    def _check(self, output: Output) -> None:
        if output.finish is FinishReason.ERROR:
            raise CheckFailed(output.error or "the engine ended the request with an error")
        if output.finish is FinishReason.CANCELLED:
            raise ApiFailure(
                503,
                output.error or "the engine cancelled the request; send it again",
                code="cancelled",
            )
