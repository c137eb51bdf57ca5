"""Owns turning a conversation into token ids by the model's own chat template.
Text that users wrote never becomes a control token; it knows nothing of requests or engines.

A template is run twice: on the text as it is, and on the same text with every character marked as
the user's. Both must agree; then the marks say which control tokens the template wrote itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from firstlight.errors import RequestError
from firstlight.inputs.answer_parser import AnswerParser
from firstlight.inputs.chat_messages import plain_value, prepared_messages
from firstlight.inputs.chat_template import ChatTemplate, Conversation, Rendered
from firstlight.inputs.element_markers import ElementMarkers
from firstlight.inputs.guarded_text import Shadow
from firstlight.inputs.rendered_prompt import RenderedPrompt, RenderOptions
from firstlight.inputs.tokenizer import Tokenizer, load_tokenizer

# Where marks are stored; the next place is taken when a text uses the one before itself.
_PLACES = (0xF0000, 0xF8000, 0x100000, 0x108000)
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "chat_template"})


class TemplateFormat:
    """The chat templates of one model with its tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str], origin: str) -> None:
        """Compiles the templates; raises ConfigError for one that is no valid template."""
        self._origin = origin
        self._tokenizer = tokenizer.with_controls(_written_tokens(tokenizer, templates.values()))
        shadows = [Shadow.of("".join(self._tokenizer.controls), place) for place in _PLACES]
        self._templates = MappingProxyType(
            {
                name: ChatTemplate(source, shadows, f"{origin}, template {name!r}")
                for name, source in templates.items()
            }
        )

    @classmethod
    def load(cls, directory_or_gguf: Path, tokenizer: Tokenizer) -> "TemplateFormat":
        """Takes the chat templates beside the tokenizer; a model without one loads too.

        Raises ConfigError for a file that cannot be read or a template that is no template.
        """
        same = tokenizer.origin in (directory_or_gguf, *directory_or_gguf.glob("*.gguf"))
        source = tokenizer if same else load_tokenizer(directory_or_gguf)
        return cls(tokenizer, source.chat_templates, str(directory_or_gguf))

    @property
    def has_template(self) -> bool:
        """Whether this model can render conversations at all."""
        return bool(self._templates)

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold images: never, as templates are given text only."""
        return False

    @property
    def markers(self) -> ElementMarkers | None:
        """No element markers: answers are plain text."""
        return None

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

        `kwargs` and the options' template_kwargs are further template variables; `documents` and
        `continue_final_message` among them mean what they mean to the reference implementation. A
        reasoning effort is a variable of that name. Raises RequestError with the template's own
        message when the template refuses the conversation.
        """
        template = self._chosen(tools)
        options = options or RenderOptions()
        given_kwargs = {**options.template_kwargs, **(kwargs or {})}
        extra = dict(plain_value(given_kwargs, "chat_template_kwargs"))
        if options.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", options.reasoning_effort)
        continued = _continued(extra.pop("continue_final_message", False))
        _check_names(extra)
        given = {"documents": None, **extra, "tools": plain_value(tools or None, "tools")}
        own = {
            **self._tokenizer.named_specials,
            "add_generation_prompt": add_generation_prompt and continued is None,
        }
        conversation = Conversation(prepared_messages(messages), given, own, continued)
        rendered = template.render(conversation)
        return RenderedPrompt(self._encoded(template, conversation, rendered), rendered.text)

    def new_parser(self, *, thinking: bool, tools: bool) -> AnswerParser | None:
        """None: what such a model answers is its content as it stands."""
        return None

    def _chosen(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if not self._templates:
            raise RequestError(
                f"{self._origin}: the model has no chat template, so chat requests cannot be "
                "rendered; send a finished prompt to /v1/completions",
                code="no_chat_template",
            )
        raise RequestError(
            f"{self._origin}: the model has chat templates only for {', '.join(self._templates)}",
            code="no_chat_template",
        )

    def _encoded(
        self, template: ChatTemplate, conversation: Conversation, rendered: Rendered
    ) -> list[int]:
        text, marked = rendered.text, rendered.marked
        spans = self._tokenizer.find_controls(text)
        if marked is None:
            self._check_harmless(template, conversation, rendered, spans)
            return self._tokenizer.encode(text, add_special=False)
        if all(text[s.start : s.end] == marked[s.start : s.end] for s in spans):
            return self._tokenizer.encode(text, add_special=False)
        parts: list[str | int] = []
        end = 0
        for span in self._tokenizer.find_controls(marked):
            parts += [text[end : span.start], span.token_id]
            end = span.end
        return self._tokenizer.encode_parts([*parts, text[end:]])

    def _check_harmless(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        rendered: Rendered,
        spans: Sequence[Any],
    ) -> None:
        """Accepts a text whose marks were lost only if no user text could have taken part."""
        edges = {char for text in self._tokenizer.controls for char in (text[0], text[-1])}
        written = "\0".join([*template.literals, *self._tokenizer.named_specials.values()])
        given = [*_strings(conversation.messages), *_strings(conversation.given)]
        suspicious = any(not edges.isdisjoint(text) for text in given)
        if suspicious or any(rendered.text[s.start : s.end].strip() not in written for s in spans):
            raise RequestError(
                "the messages hold characters of the model's control tokens, and the model's chat "
                "template rewrites text in a way that these cannot be kept apart; send the "
                "conversation without '<', '|', '[' and the like, or use /v1/completions",
                "messages",
                "control_tokens_in_text",
            )


def _written_tokens(tokenizer: Tokenizer, sources: Any) -> list[str]:
    """Added tokens, other than white space, that a template writes in its own text."""
    written = "\0".join(sources)
    return [text for text in tokenizer.added_tokens if text.strip() and text in written]


def _continued(value: Any) -> str | None:
    if not isinstance(value, (bool, str)):
        raise RequestError("continue_final_message must be true, false or a field's name")
    return "content" if value is True else value or None


def _check_names(extra: Mapping[str, Any]) -> None:
    refused = sorted(name for name in extra if name in _RESERVED or name.startswith("_"))
    if refused:
        raise RequestError(
            f"chat_template_kwargs cannot set {', '.join(refused)}", "chat_template_kwargs"
        )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *_strings(item))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
