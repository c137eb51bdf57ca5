"""Owns k3-mini's examples as conversations, rendered by the encoder that renders requests.

It knows no task. What the assistant says counts; what it is told does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from firstlight.inputs.chat_messages import num_images
from firstlight.inputs.images.pixels import image_patches
from firstlight.inputs.images.preprocess_settings import read_preprocess_settings
from firstlight.inputs.images.sizes import plan_image
from firstlight.inputs.kimi_k3.encoder import EncoderOptions, chat_segments
from firstlight.inputs.tokenizer import Tokenizer, load_tokenizer
from firstlight.training.examples import Example, Picture

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as a client would write them, with answers; `images` stand where parts say so.
    `task` is what accuracy is reported under.
    """

    task: str
    messages: Sequence[Message]
    thinking: bool
    tools: Sequence[Mapping[str, Any]] = ()
    images: Sequence[Image.Image] = ()


class Renderer:
    """Conversations and plain text to examples, with the tokenizer and settings of a folder."""

    def __init__(self, folder: Path) -> None:
        settings = read_preprocess_settings(folder)
        assert settings is not None, f"{folder} holds no preprocessor_config.json"
        self.settings = settings
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.specials = dict(self.tokenizer.controls)
        self.media_pad_id = self.specials["<|media_pad|>"]
        self._cached = lru_cache(maxsize=65536)(self._encoded)

    def example(self, talk: Conversation) -> Example:
        """Returns the whole conversation; of each message of the assistant what it generates
        counts.
        """
        tokens: list[int] = []
        counts: list[bool] = []
        for number, message in enumerate(talk.messages):
            if message["role"] != "assistant":
                continue
            prompt = self._ids(talk, number, prompt=True)
            whole = self._ids(talk, number + 1, prompt=False)
            assert whole[: len(prompt)] == prompt, "an answer changes what came before it"
            counts += [False] * (len(prompt) - len(counts))
            counts += [True] * (len(whole) - len(prompt))
            tokens = whole
        placed: list[Picture] = []
        place = 0
        for image in talk.images:
            shown, size = self.picture(image)
            place = tokens.index(self.media_pad_id, place)
            tokens[place : place + 1] = [self.media_pad_id] * size
            counts[place : place + 1] = [False] * size
            placed.append(shown._replace(first=place))
            place += size
        return Example(talk.task, tuple(tokens), tuple(counts), tuple(placed))

    def picture(self, image: Image.Image) -> tuple[Picture, int]:
        """Returns the patches of an image, as the service makes them, and the tokens it takes."""
        plan = plan_image(*image.size, self.settings)
        return Picture(0, plan.grid, image_patches(image, plan, self.settings)), plan.num_tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return self.tokenizer.encode_plain(text)

    def single(self, text: str) -> int:
        """The one token of a text."""
        (token,) = self._cached(text, False)
        return token

    def _ids(self, talk: Conversation, messages: int, *, prompt: bool) -> list[int]:
        shown = talk.messages[:messages]
        options = EncoderOptions(
            thinking=talk.thinking,
            add_generation_prompt=prompt,
            image_sizes=[image.size for image in talk.images[: num_images(shown)]],
        )
        ids: list[int] = []
        for segment in chat_segments(shown, talk.tools, options):
            ids += self._cached(segment.text, segment.special)
        return ids

    def _encoded(self, text: str, special: bool) -> list[int]:
        if special:
            return self.tokenizer.encode(text, add_special=False)
        return self.tokenizer.encode_plain(text)


def answer(text: str, thought: str = "") -> dict[str, Any]:
    """Returns a message of the assistant."""
    return {"role": "assistant", "content": text, "reasoning_content": thought}


def question(text: str) -> dict[str, Any]:
    """Returns a message of the user."""
    return {"role": "user", "content": text}
