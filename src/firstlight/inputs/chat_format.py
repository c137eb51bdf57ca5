"""Owns what the rest of firstlight may ask of a model's chat format, and finding the right one.
It knows nothing of how a format writes a conversation or reads an answer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from firstlight.inputs.answer_parser import AnswerParser
from firstlight.inputs.element_markers import ElementMarkers
from firstlight.inputs.json_object import read_object
from firstlight.inputs.kimi_k3.chat import KimiK3Format
from firstlight.inputs.rendered_prompt import RenderedPrompt, RenderOptions
from firstlight.inputs.template_format import TemplateFormat
from firstlight.inputs.tokenizer import Tokenizer

__all__ = ["ChatFormat", "RenderOptions", "RenderedPrompt", "load_chat_format"]


class ChatFormat(Protocol):
    """How one model is shown conversations and how its answers are read; thread-safe."""

    @property
    def has_template(self) -> bool:
        """Whether this model can render conversations at all."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold image parts; their sizes then go into the options."""
        ...

    @property
    def markers(self) -> ElementMarkers | None:
        """The element markers of the model's answers, for grammars; None for plain text."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: RenderOptions | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Renders and encodes a conversation; no text in it becomes a control token.

        `kwargs` come on top of the options' template_kwargs. Raises RequestError naming the field
        that cannot be rendered.
        """
        ...

    def new_parser(self, *, thinking: bool, tools: bool) -> AnswerParser | None:
        """A parser for one answer; None when the answer's text is the content.

        `thinking` is that of the rendered prompt; without `tools` calls are left out.
        """
        ...


def load_chat_format(directory_or_gguf: Path, tokenizer: Tokenizer) -> ChatFormat:
    """The chat format of a model folder: Kimi K3's own, else the templates beside the tokenizer.

    A template in the folder of a Kimi K3 changes nothing, as no template can keep users' text
    apart there. Raises ConfigError for a file that cannot be read or a template that is none.
    """
    config = read_object(directory_or_gguf / "config.json") if directory_or_gguf.is_dir() else {}
    untold = "model_type" not in config and not tokenizer.chat_templates
    if config.get("model_type") == "kimi_k3" or (untold and KimiK3Format.fits(tokenizer)):
        return KimiK3Format(tokenizer)
    return TemplateFormat.load(directory_or_gguf, tokenizer)
