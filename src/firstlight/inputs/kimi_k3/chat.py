"""Owns Kimi K3's chat format as requests use it: what may be asked, and the prompt's token ids.
It knows nothing of engines, nor of how images become features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.answer_parser import AnswerParser
from firstlight.inputs.chat_messages import num_images, plain_value, prepared_messages
from firstlight.inputs.element_markers import ElementMarkers
from firstlight.inputs.kimi_k3.encoder import EFFORTS, EncoderOptions, chat_segments
from firstlight.inputs.kimi_k3.parser import KimiK3Parser
from firstlight.inputs.kimi_k3.segments import (
    CLOSE,
    END_OF_MESSAGE,
    IMAGE_PAD,
    IMAGE_PLACEHOLDER,
    OPEN,
    SEP,
    Segment,
)
from firstlight.inputs.rendered_prompt import RenderedPrompt, RenderOptions
from firstlight.inputs.tokenizer import Tokenizer

_MARKERS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)
_ROLES = ("system", "user", "assistant", "tool")
_HARMLESS_PLACEHOLDER = "<| kimi_image_placeholder |>"
_KWARGS = ("thinking", "thinking_effort")


class KimiK3Format:
    """The chat format of Kimi K3 with its tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError when the tokenizer lacks a marker of the format."""
        missing = [text for text in _MARKERS if text not in tokenizer.added_tokens]
        if missing:
            raise ConfigError(
                f"{tokenizer.origin}: the tokenizer has no token {', '.join(missing)}, which Kimi "
                "K3's chat format is made of; copy the model's own tokenizer files there"
            )
        self._tokenizer = tokenizer
        ids = tokenizer.added_tokens
        self._pad_id = ids.get(IMAGE_PAD)
        self._markers = ElementMarkers(open=ids[OPEN], close=ids[CLOSE], sep=ids[SEP])

    @staticmethod
    def fits(tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer has all markers of the format."""
        return all(text in tokenizer.added_tokens for text in _MARKERS)

    @property
    def has_template(self) -> bool:
        """True: the format needs no file."""
        return True

    @property
    def takes_images(self) -> bool:
        """Whether the vocabulary has the tokens of image blocks."""
        return self._pad_id is not None

    @property
    def markers(self) -> ElementMarkers | None:
        """The element markers of the model's answers."""
        return self._markers

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: RenderOptions | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Renders and encodes a conversation.

        Reasoning is on unless the effort is "none" or the template variable `thinking` is false;
        the other efforts are low, high and max. The role developer is written as system. Raises
        RequestError naming the field that is not understood.
        """
        options = options or RenderOptions()
        prepared = [
            _as_known(message, f"messages[{index}]")
            for index, message in enumerate(
                prepared_messages(messages, takes_images=self.takes_images)
            )
        ]
        if num_images(prepared) != len(options.image_sizes):
            raise RequestError(
                f"{num_images(prepared)} images in the messages, but {len(options.image_sizes)} "
                "were read",
                "messages",
            )
        switches = _switches(options, kwargs, add_generation_prompt)
        segments = chat_segments(prepared, plain_value(tools or None, "tools"), switches)
        return self._encoded(segments, switches)

    def new_parser(self, *, thinking: bool, tools: bool) -> AnswerParser | None:
        """A parser for one answer; without `tools` calls are left out."""
        return KimiK3Parser(self._tokenizer, self._markers, thinking=thinking, tools=tools)

    def _encoded(self, segments: Sequence[Segment], switches: EncoderOptions) -> RenderedPrompt:
        ids: list[int] = []
        positions: list[int] = []
        for segment in segments:
            if segment.special:
                added = self._tokenizer.encode(segment.text, add_special=False)
                pads = (place for place, token_id in enumerate(added) if token_id == self._pad_id)
                positions += (len(ids) + place for place in pads)
                ids += added
            else:
                ids += self._tokenizer.encode_plain(segment.text)
        return RenderedPrompt(
            ids,
            "".join(segment.text for segment in segments),
            image_positions=tuple(positions),
            thinking=switches.thinking and switches.add_generation_prompt,
        )


def _switches(
    options: RenderOptions, kwargs: Mapping[str, Any] | None, add_generation_prompt: bool
) -> EncoderOptions:
    given = {**options.template_kwargs, **(kwargs or {})}
    unknown = sorted(given.keys() - set(_KWARGS))
    if unknown:
        raise RequestError(
            f"chat_template_kwargs: {', '.join(unknown)} unknown; this model's are "
            f"{' and '.join(_KWARGS)}",
            "chat_template_kwargs",
        )
    thinking = given.get("thinking", True)
    if not isinstance(thinking, bool):
        raise RequestError("thinking must be true or false", "chat_template_kwargs")
    effort = options.reasoning_effort or given.get("thinking_effort", EFFORTS[-1])
    if effort == "none":
        thinking = False
    if thinking and effort is not None and effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {effort!r}; this model takes none, {', '.join(EFFORTS)}",
            "reasoning_effort",
        )
    return EncoderOptions(
        thinking=thinking,
        effort=effort,
        add_generation_prompt=add_generation_prompt,
        tool_choice=_tool_choice(options.tool_choice),
        response_format=options.response_format,
        image_sizes=options.image_sizes,
    )


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str | None:
    """The format knows required and none; a named function is required, and which one is the
    grammar's to say."""
    return "required" if isinstance(choice, Mapping) else choice


def _as_known(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message under a role the format knows, its text clear of image placeholders."""
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in _ROLES:
        raise RequestError(
            f"{where}.role is {role!r}; this model knows {', '.join(_ROLES)} and developer",
            f"{where}.role",
        )
    harmless: dict[str, Any] = _without_placeholders(message)
    return {**harmless, "role": role}


def _without_placeholders(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(IMAGE_PLACEHOLDER, _HARMLESS_PLACEHOLDER)
    if isinstance(value, Mapping):
        return {key: _without_placeholders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_placeholders(item) for item in value]
    return value
