"""Owns running one chat template on a conversation and saying which characters users wrote.
It knows nothing of token ids.
"""

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2

from firstlight.errors import ConfigError, RequestError
from firstlight.inputs.chat_messages import KNOWN_ROLES, fitted_content
from firstlight.inputs.guarded_text import Shadow
from firstlight.inputs.template_program import TEMPLATE_ERRORS, TemplateProgram

_PROBE = "Probe7Text"


class Rendered(NamedTuple):
    """A rendered conversation: `marked` is `text` with users' characters marked by `shadow`.

    `marked` is None when the template does things to text that the marks cannot be followed
    through.
    """

    text: str
    marked: str | None
    shadow: Shadow


class Conversation(NamedTuple):
    """What a template is given: `messages`, users' other variables, and the model's own.

    `continued` names the field of the last message that is left open, if any.
    """

    messages: list[dict[str, Any]]
    given: Mapping[str, Any]
    own: Mapping[str, Any]
    continued: str | None = None


class ChatTemplate:
    """One compiled template; rendering is pure but for the date it may ask for."""

    def __init__(self, source: str, shadows: Sequence[Shadow], where: str) -> None:
        """Raises ConfigError, naming `where`, when `source` is no template."""
        self._source, self._where = source, where
        self._shadows = shadows
        self._program = self._compiled(shadows[0])
        self.literals = self._program.literals
        self._takes_text = self._reads(_PROBE)
        self._takes_parts = self._reads([{"type": "text", "text": _PROBE}])

    def render(self, conversation: Conversation) -> Rendered:
        """Renders the conversation; raises RequestError with the template's own message."""
        now = datetime.now()
        fitted = conversation._replace(
            messages=[self._fitted(message) for message in conversation.messages]
        )
        text = self._run(self._program, fitted, None, now)
        program = self._program_without(f"{fitted.messages}{fitted.given}{text}")
        try:
            marked = self._run(program, fitted, program.shadow, now)
        except RequestError:
            return Rendered(text, None, program.shadow)
        same = program.shadow.reveal(marked) == text
        return Rendered(text, marked if same else None, program.shadow)

    def _compiled(self, shadow: Shadow) -> TemplateProgram:
        try:
            return TemplateProgram(self._source, shadow)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{self._where}: chat template, line {error.lineno}: {error.message}"
            ) from error

    def _program_without(self, everything: str) -> TemplateProgram:
        """The program whose marks occur nowhere in what the template is given or writes."""
        if everything.isascii() or not self._shadows[0].has_marks(everything):
            return self._program
        free = next((s for s in self._shadows if not s.has_marks(everything)), None)
        if free is None:
            raise RequestError("the messages use too many private-use characters", "messages")
        return self._compiled(free)

    def _run(
        self,
        program: TemplateProgram,
        conversation: Conversation,
        shadow: Shadow | None,
        now: datetime,
    ) -> str:
        messages = [_guarded_message(message, shadow) for message in conversation.messages]
        given = {key: _guarded(value, shadow) for key, value in conversation.given.items()}
        tag = f"continue{secrets.token_hex(8)} "
        if conversation.continued is not None:
            _append(messages[-1], conversation.continued, tag)
        variables = {**conversation.own, **given, "messages": messages}
        try:
            text = program.render(variables, now)
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template: {_told(error, program)}", "messages"
            ) from error
        return text if conversation.continued is None else _cut(text, tag)

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        if "content" not in message:
            return message
        content = fitted_content(
            message, takes_text=self._takes_text, takes_parts=self._takes_parts
        )
        return {**message, "content": content}

    def _reads(self, content: Any) -> bool:
        """Whether the template writes the text of such content, and not the list around it."""
        message = {"role": "user", "content": content}
        variables = {"messages": [message], "add_generation_prompt": True, "tools": None}
        try:
            text = self._program.render(variables, datetime.now())
        except TEMPLATE_ERRORS:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _told(error: Exception, program: TemplateProgram) -> str:
    message = error.message if isinstance(error, jinja2.TemplateError) else str(error)
    plain = program.shadow.reveal(message or "")
    return plain if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {plain}"


def _guarded(value: Any, shadow: Shadow | None) -> Any:
    if shadow is None:
        return value
    if isinstance(value, str):
        return shadow.guard(value)
    if isinstance(value, Mapping):
        return {shadow.guard(k): _guarded(item, shadow) for k, item in value.items()}
    if isinstance(value, list):
        return [_guarded(item, shadow) for item in value]
    return value


def _guarded_message(message: Mapping[str, Any], shadow: Shadow | None) -> dict[str, Any]:
    """The message guarded, but for its role when that is one templates are written for.

    A new dictionary in any case.
    """
    guarded = dict(message) if shadow is None else _guarded(message, shadow)
    if message.get("role") in KNOWN_ROLES:
        guarded["role"] = message["role"]
    return {str(key) if key == "role" else key: value for key, value in guarded.items()}


def _append(message: dict[str, Any], name: str, tag: str) -> None:
    value = message.get(name)
    if isinstance(value, str):
        message[name] = value + tag
        return
    parts = value if isinstance(value, list) else []
    if not parts:
        raise RequestError(f"the last message has no {name} to continue", "messages")
    message[name] = [*parts[:-1], {**parts[-1], "text": parts[-1]["text"] + tag}]


def _cut(text: str, tag: str) -> str:
    """Ends the text where the last message's text ended, trimmed if the template trims it."""
    place = text.rfind(tag.rstrip())
    if place < 0:
        raise RequestError(
            "the chat template drops the last message's text, so it cannot be continued",
            "messages",
        )
    return text[:place] if text.startswith(tag, place) else text[:place].rstrip()
