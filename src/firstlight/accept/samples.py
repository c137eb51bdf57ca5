"""Owns the bundled prompts with known answers: how a profile is read and when an answer is right.

Knows nothing of endpoints; profiles are data files beside this one, their images in `pictures/`.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

import msgspec

from firstlight.accept.client import Api
from firstlight.errors import UsageError

_PREFIX, _SUFFIX = "samples_", ".json"
Ability = Literal["images", "reasoning", "tools"]


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that a sample should lead to: the tool's name and its arguments, by name."""

    name: str
    arguments: dict[str, Any]


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt and what counts as right.

    `exact` compares the whole text with the only entry of `accept`; `contains` looks for any entry
    as whole words, whatever the case; `any` takes every text. `finish_reason`, `prompt_tokens`,
    `reasoning` and `calls` are compared where given. `must_stop` says that any working chat model
    ends this answer itself. `images` names files shown before the prompt; `after` holds messages
    that follow it, as a client would send them. `shown` puts the exchange into the report.
    """

    name: str
    group: str
    api: Api
    prompt: str
    accept: tuple[str, ...] = ()
    match: Literal["exact", "contains", "any"] = "contains"
    max_tokens: int | None = None
    finish_reason: str = ""
    prompt_tokens: int | None = None
    must_stop: bool = False
    images: tuple[str, ...] = ()
    after: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    effort: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] | None = None
    shown: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The fields of a request that this sample adds or replaces."""
        found: dict[str, Any] = {"messages": self._messages()} if self.api == "chat" else {}
        if self.tools:
            found["tools"] = list(self.tools)
        if self.effort:
            found["reasoning_effort"] = self.effort
        return found

    def _messages(self) -> list[dict[str, Any]]:
        content: Any = self.prompt
        if self.images:
            parts = [
                {"type": "image_url", "image_url": {"url": picture_url(n)}} for n in self.images
            ]
            content = [*parts, {"type": "text", "text": self.prompt}]
        return [{"role": "user", "content": content}, *self.after]


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many answers of a group must be right: below `need` fails, below 1 warns."""

    name: str
    need: float


class Likelihood(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probabilities (natural, one a token from the second on) of a text's own tokens.

    `tolerances` says by type of compute how far the mean of the absolute differences may be: twice
    what layouts and rounding were measured to change. In float32 that is below what one damaged
    expert does; in the shorter types larger damage alone shows.
    """

    name: str
    text: str
    logprobs: tuple[float, ...]
    tolerances: dict[str, float]

    def tolerance(self, dtype: str) -> float:
        """What is allowed of a service that computes in a type; of one not recorded, the most."""
        return self.tolerances.get(dtype, max(self.tolerances.values()))


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A set of samples for one model, or for any; `demands` names abilities it must have."""

    name: str
    description: str
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]
    demands: tuple[Ability, ...] = ()
    likelihoods: tuple[Likelihood, ...] = ()


def profile_names() -> list[str]:
    """The names of the bundled profiles."""
    files = (entry.name for entry in resources.files(__package__ or "").iterdir())
    found = [name for name in files if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]
    return sorted(name[len(_PREFIX) : -len(_SUFFIX)] for name in found)


def load_profile(name: str) -> Profile:
    """Reads a bundled profile; raises UsageError naming those there are."""
    names = profile_names()
    if name not in names:
        raise UsageError(f"there is no smoke profile {name!r}; there are: {', '.join(names)}")
    file = resources.files(__package__ or "") / f"{_PREFIX}{name}{_SUFFIX}"
    return msgspec.json.decode(file.read_bytes(), type=Profile)


def picture_url(name: str) -> str:
    """A bundled picture as a data URL."""
    data = (resources.files(__package__ or "") / "pictures" / name).read_bytes()
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def is_right(sample: Sample, text: str) -> bool:
    """Whether a text is a right answer; spaces around it and Unicode composition do not count."""
    if sample.match == "any":
        return bool(text.strip())
    if sample.match == "exact":
        return text == sample.accept[0]
    return any(_holds(text, wanted) for wanted in sample.accept)


def calls_problem(wanted: tuple[Call, ...], got: tuple[Mapping[str, Any], ...]) -> str:
    """What is wrong with the calls of an answer, as `name` and `arguments` (JSON); empty when
    they are those wanted.
    """
    try:
        found = [(call["name"], msgspec.json.decode(call["arguments"])) for call in got]
    except (KeyError, TypeError, msgspec.DecodeError):
        return f"calls that cannot be read: {[dict(call) for call in got]!a}"
    if found != [(call.name, call.arguments) for call in wanted]:
        return f"calls {found!a}"
    return ""


def _holds(text: str, wanted: str) -> bool:
    plain_text, plain_wanted = (
        unicodedata.normalize("NFC", value).casefold() for value in (text, wanted)
    )
    return re.search(rf"(?<!\w){re.escape(plain_wanted)}(?!\w)", plain_text) is not None
