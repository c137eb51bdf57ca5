"""Owns the records around rendering: what a request may ask of a chat format, and what comes back.
It knows no format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RenderOptions:
    """What a request says about its prompt beside the messages and tools.

    `image_sizes` are (width, height) in pixels of the images in the messages, in their order, as
    the images came. `template_kwargs` are variables of the model's own format.
    """

    reasoning_effort: str | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    image_sizes: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as the model reads it: `text`, and the token ids it was encoded to.

    `image_positions[i]` is the index in `token_ids` of the one pad token of image i, which the
    caller repeats for each of the image's features. `thinking` says that the prompt ends inside
    the model's reasoning.
    """

    token_ids: list[int]
    text: str
    image_positions: tuple[int, ...] = ()
    thinking: bool = False
