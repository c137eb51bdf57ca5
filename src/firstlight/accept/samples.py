"""Owns the bundled prompts with known answers: how a profile is read and when an answer is right.

Knows nothing of endpoints; profiles are data files beside this one.
"""

from __future__ import annotations

import re
import unicodedata
from importlib import resources
from typing import Literal

import msgspec

from firstlight.accept.client import Api
from firstlight.errors import UsageError

_PREFIX, _SUFFIX = "samples_", ".json"


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt and what counts as right.

    `exact` compares the whole text with the only entry of `accept`; `contains` looks for any entry
    as whole words, whatever the case; `any` takes every text. `finish_reason` and `prompt_tokens`
    are compared where given. `must_stop` says that any working chat model ends this answer itself.
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


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many answers of a group must be right: below `need` fails, below 1 warns."""

    name: str
    need: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A set of samples for one model, or for any."""

    name: str
    description: str
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]


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


def is_right(sample: Sample, text: str) -> bool:
    """Whether a text is a right answer; spaces around it and Unicode composition do not count."""
    if sample.match == "any":
        return bool(text.strip())
    if sample.match == "exact":
        return text == sample.accept[0]
    return any(_holds(text, wanted) for wanted in sample.accept)


def _holds(text: str, wanted: str) -> bool:
    plain_text, plain_wanted = (
        unicodedata.normalize("NFC", value).casefold() for value in (text, wanted)
    )
    return re.search(rf"(?<!\w){re.escape(plain_wanted)}(?!\w)", plain_text) is not None
