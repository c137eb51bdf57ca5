"""Owns how settings are resolved: flag over environment over file over default, once, with origins.

Refuses to know what any setting is used for; it alone reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from firstlight.errors import BadInput, UsageError
from firstlight.units import parse_bytes, parse_count

Kind = Literal["plain", "bytes", "count"]
T = TypeVar("T")

PREFIX = "FIRSTLIGHT_"
# Variables that steer the process or its tests and are no field of a settings class.
PROCESS_VARIABLES = frozenset({"FIRSTLIGHT_DEBUG", "FIRSTLIGHT_CACHE", "FIRSTLIGHT_SETTINGS"})
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Field:
    """What is known of a setting beside its type: help, bounds, allowed words, how to read it.

    `secret` values are never shown. `optional_text` says what None means, for help and describe.
    """

    help: str
    kind: Kind = "plain"
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    optional_text: str = "none"


def setting(default: Any, help: str, **details: Any) -> Any:
    """A dataclass field with a default and the details of `Field`."""
    return dataclasses.field(default=default, metadata={"setting": Field(help, **details)})


def required(help: str, **details: Any) -> Any:
    """A dataclass field that has no default."""
    return dataclasses.field(metadata={"setting": Field(help, **details)})


@dataclass(frozen=True)
class Origin:
    """Where a value came from: `text` names the flag, variable or file."""

    source: Literal["flag", "environment", "file", "plan", "default"]
    text: str


@dataclass(frozen=True)
class Suggested:
    """Values that stand where nobody set another, and what they come from."""

    values: Mapping[str, Any]
    text: str


NOTHING_SUGGESTED = Suggested(types.MappingProxyType({}), "")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """Settings and, for every field, where its value came from."""

    value: T
    origins: Mapping[str, Origin]

    def describe(self) -> tuple[str, ...]:
        """One line a setting, `name = value  (origin)`; secrets are hidden."""
        lines = []
        for name, detail in fields_of(type(self.value)).items():
            value = getattr(self.value, name)
            shown = detail.optional_text if value is None else str(value)
            if detail.secret and value is not None:
                shown = "(set)"
            lines.append(f"{name} = {shown}  ({self.origins[name].text})")
        return tuple(lines)


def resolve(
    cls: type[T],
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    suggested: Suggested = NOTHING_SUGGESTED,
) -> Resolved[T]:
    """Reads every field of `cls` from flag, environment, file, what is suggested or default, the
    first that has it.

    `flags` maps field names to values, None meaning not given. `environment` None is the process's
    own. The file is JSON, `{field: value}`. Raises UsageError listing every unknown key and every
    value that cannot be read, BadInput when the file cannot be read at all.
    """
    environment = os.environ if environment is None else environment
    known = fields_of(cls)
    from_file = _read_file(file) if file is not None else {}
    problems = _unknown(known, flags, environment, from_file)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    hints = typing.get_type_hints(cls)
    for name, detail in known.items():
        raw, origin = _find(name, flags, environment, (from_file, file))
        if origin.source == "default" and name in suggested.values:
            raw, origin = suggested.values[name], Origin("plan", suggested.text)
        origins[name] = origin
        if origin.source == "default":
            continue
        try:
            values[name] = read_value(raw, hints[name], detail)
        except UsageError as problem:
            problems.append(f"{name} ({origin.text}): {problem}")
    problems += _missing(cls, values, problems)
    if problems:
        raise UsageError("settings cannot be used: " + "; ".join(problems))
    return Resolved(cls(**values), types.MappingProxyType(origins))


def resolve_one(
    cls: type[Any], name: str, flags: Mapping[str, Any], file: Path | None = None
) -> Any:
    """Returns one field as `resolve` finds it, before the others are looked at; None when nobody
    set it.

    Raises UsageError for a value that cannot be read, BadInput for a file that cannot.
    """
    from_file = _read_file(file) if file is not None else {}
    raw, _ = _find(name, flags, os.environ, (from_file, file))
    return read_value(raw, typing.get_type_hints(cls)[name], fields_of(cls)[name])


def resolve_flags(cls: type[T], flags: Mapping[str, Any]) -> T:
    """Reads a verb's settings from its flags, and secrets not given there from their variables.

    Raises UsageError as `resolve` does.
    """
    secrets = {variable_of(name) for name, detail in fields_of(cls).items() if detail.secret}
    given = {name: text for name, text in os.environ.items() if name in secrets}
    return resolve(cls, flags, given).value


def fields_of(cls: type[Any]) -> dict[str, Field]:
    """The settings of a dataclass by name, in the order they are declared."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(cls)}


def variable_of(name: str) -> str:
    """The environment variable of a field: `FIRSTLIGHT_MAX_SEQUENCES`."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """The command-line flag of a field: `--max-sequences`."""
    return "--" + name.replace("_", "-")


def debug_wanted() -> bool:
    """Whether FIRSTLIGHT_DEBUG asks for tracebacks."""
    return os.environ.get("FIRSTLIGHT_DEBUG", "").lower() in _TRUE


def settings_file(flag: Path | None) -> Path | None:
    """The settings file to read: the flag's, else the one FIRSTLIGHT_SETTINGS names, else none."""
    named = os.environ.get("FIRSTLIGHT_SETTINGS")
    return flag or (Path(named) if named else None)


def read_value(raw: Any, hint: Any, detail: Field) -> Any:
    """Turns a flag, a variable's text or a JSON value into the field's type and checks its bounds.

    Raises UsageError saying what the value must be.
    """
    optional = type(None) in typing.get_args(hint)
    base = next((a for a in typing.get_args(hint) if a is not type(None)), hint)
    # Text has no words that stand for "left out": an empty key must not switch the key off.
    unset = isinstance(raw, str) and base is not str and raw.lower() in ("", "none", "auto")
    if optional and (raw is None or unset):
        return None
    value = _readers(detail.kind)[base](raw)
    if detail.minimum is not None and value < detail.minimum:
        raise UsageError(f"{value} is too small; it must be at least {detail.minimum:g}")
    if detail.choices and value not in detail.choices:
        raise UsageError(f"{value!r} is none of {', '.join(detail.choices)}")
    return value


def _readers(kind: Kind) -> dict[Any, Callable[[Any], Any]]:
    numbers = {"plain": _whole, "bytes": parse_bytes, "count": parse_count}
    return {
        str: _text,
        bool: _truth,
        float: _fraction,
        Path: lambda raw: Path(_text(raw)),
        int: lambda raw: numbers[kind](raw) if isinstance(raw, str) else _whole(raw),
    }


def _text(raw: Any) -> str:
    if not isinstance(raw, (str, Path)):
        raise UsageError(f"{raw!r} is not text")
    return str(raw)


def _truth(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).lower()
    if word not in _TRUE | _FALSE:
        raise UsageError(f"{raw!r} is neither true nor false; write 1 or 0")
    return word in _TRUE


def _whole(raw: Any) -> int:
    try:
        assert not isinstance(raw, (bool, float))
        return int(raw)
    except (AssertionError, TypeError, ValueError):
        raise UsageError(f"{raw!r} is not a whole number") from None


def _fraction(raw: Any) -> float:
    try:
        value = float(raw)
        assert not isinstance(raw, bool) and value - value == 0
    except (AssertionError, TypeError, ValueError):
        raise UsageError(f"{raw!r} is not a finite number") from None
    return value


def _find(
    name: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: tuple[Mapping[str, Any], Path | None],
) -> tuple[Any, Origin]:
    if flags.get(name) is not None:
        return flags[name], Origin("flag", f"flag {flag_of(name)}")
    if variable_of(name) in environment:
        return environment[variable_of(name)], Origin("environment", variable_of(name))
    if name in file[0]:
        return file[0][name], Origin("file", f"file {file[1]}")
    return None, Origin("default", "default")


def _unknown(
    known: Mapping[str, Field],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    from_file: Mapping[str, Any],
) -> list[str]:
    variables = {variable_of(name) for name in known} | PROCESS_VARIABLES
    ours = [name for name in environment if name.startswith(PREFIX)]
    return [
        *(f"unknown flag {flag_of(name)}" for name in sorted(set(flags) - set(known))),
        *(f"unknown variable {name}" for name in sorted(set(ours) - variables)),
        *(f"unknown key {name!r} in the file" for name in sorted(set(from_file) - set(known))),
    ]


def _missing(cls: type[Any], values: Mapping[str, Any], problems: list[str]) -> list[str]:
    mentioned = " ".join(problems)
    return [
        f"{field.name} is not given; use {flag_of(field.name)} or {variable_of(field.name)}"
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
        and field.name not in values
        and f"{field.name} (" not in mentioned
    ]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BadInput(f"settings file {path} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise BadInput(f"settings file {path} is not JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise BadInput(f"settings file {path} must hold one JSON object, {{setting: value}}")
    return content
