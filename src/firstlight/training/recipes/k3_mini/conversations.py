"""Owns k3-mini's examples as conversations, rendered by the encoder that renders requests.

It knows no task. What the assistant says counts; what it is told does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from firstlight.inputs.kimi_k3.encoder import EncoderOptions, chat_segments
from firstlight.inputs.tokenizer import Tokenizer, load_tokenizer
from firstlight.training.examples import Example, Picture

Message = Mapping[str, Any]


class Renderer:
    """Conversations and plain text to examples, with one tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.specials = dict(self.tokenizer.controls)
        self.media_pad_id = self.specials["<|media_pad|>"]
        self._cached = lru_cache(maxsize=65536)(self._encoded)

    def conversation(
        self,
        task: str,
        messages: Sequence[Message],
        *,
        options: EncoderOptions,
        tools: Sequence[Mapping[str, Any]] | None = None,
        pictures: Sequence[tuple[Picture, int]] = (),
    ) -> Example:
        """Returns the whole conversation; of each message of the assistant what it generates
        counts. `pictures` are its images in order, each with its number of tokens.
        """
        tokens: list[int] = []
        counts: list[bool] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._ids(messages[:number], tools, options, prompt=True)
            whole = self._ids(messages[: number + 1], tools, options, prompt=False)
            assert whole[: len(prompt)] == prompt, "an answer changes what came before it"
            counts += [False] * (len(prompt) - len(counts))
            counts += [True] * (len(whole) - len(prompt))
            tokens = whole
        placed: list[Picture] = []
        place = 0
        for shown, size in pictures:
            place = tokens.index(self.media_pad_id, place)
            tokens[place : place + 1] = [self.media_pad_id] * size
            counts[place : place + 1] = [False] * size
            placed.append(shown._replace(first=place))
            place += size
        return Example(task, tuple(tokens), tuple(counts), tuple(placed))

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self.tokenizer.encode_plain(text)

    def single(self, text: str) -> int:
        """The one token of a text."""
        (token,) = self._cached(text, False)
        return token

    def _ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: EncoderOptions,
        *,
        prompt: bool,
    ) -> list[int]:
        switches = EncoderOptions(
            thinking=options.thinking,
            effort=options.effort,
            add_generation_prompt=prompt,
            image_sizes=(options.image_sizes or ())[: _num_images(messages)],
        )
        ids: list[int] = []
        for segment in chat_segments(messages, tools, switches):
            ids += self._cached(segment.text, segment.special)
        return ids

    def _encoded(self, text: str, special: bool) -> list[int]:
        if special:
            return self.tokenizer.encode(text, add_special=False)
        return self.tokenizer.encode_plain(text)


def _num_images(messages: Sequence[Message]) -> int:
    parts = (m["content"] for m in messages if not isinstance(m["content"], str))
    return sum(part["type"] == "image" for content in parts for part in content)


def answer(text: str, thought: str = "") -> dict[str, Any]:
    """Returns a message of the assistant."""
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def question(text: str) -> dict[str, Any]:
    """Returns a message of the user."""
    return {"role": "user", "content": text}
