"""Owns how a dataclass of settings becomes options of a verb, so that flags cannot drift from it.

Knows typer and the details of `settings.Field`; refuses to know what any setting means.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from firstlight.settings.settings import Field, fields_of, flag_of

EXIT_CODES = (
    "Exit codes: 0 all holds, 1 a check failed, 2 usage, 3 bad input, 4 environment, "
    "70 a bug in firstlight, 130 interrupted."
)
_BUDGET = "-budget-bytes"
_SWITCH: Mapping[bool, str] = {True: "on", False: "off"}
AsJson = Annotated[bool, typer.Option("--json", help="print the report as JSON")]


def options_from(
    cls: type[Any], *, arguments: tuple[str, ...] = ()
) -> Callable[[Callable[..., int]], Callable[..., Any]]:
    """Makes a verb of a function whose first parameter takes the flags given, by field name.

    Fields named in `arguments` become positional, all others options; both are None when not
    given. Further parameters of the function stay options of their own.
    """
    generated = _parameters(cls, arguments)
    names = [parameter.name for parameter in generated]

    def decorate(function: Callable[..., int]) -> Callable[..., Any]:
        declared = inspect.signature(function, eval_str=True).parameters.values()
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in declared][1:]

        def verb(**given: Any) -> int:
            flags: Mapping[str, Any] = {name: given.pop(name) for name in names}
            return function(flags, **given)

        parameters = [*generated, *own]
        verb.__name__, verb.__doc__ = function.__name__, function.__doc__
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return verb

    return decorate


def _parameters(cls: type[Any], arguments: tuple[str, ...]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    found = [
        _parameter(name, hints[name], detail, fields[name].default, name in arguments)
        for name, detail in fields_of(cls).items()
    ]
    return sorted(found, key=lambda parameter: parameter.name not in arguments)


def _parameter(
    name: str, hint: Any, detail: Field, default: Any, is_argument: bool
) -> inspect.Parameter:
    kind = next((part for part in typing.get_args(hint) if part is not type(None)), hint)
    required = is_argument and default is dataclasses.MISSING
    taken: Any = kind if detail.kind == "plain" else str
    if not required:
        taken = taken | None
    text = _help(detail, default)
    info: Any = (
        typer.Argument(help=text, show_default=False, metavar=name.upper())
        if is_argument
        else typer.Option(*_declared(name, kind), help=text, show_default=False)
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[taken, info],
        default=inspect.Parameter.empty if required else None,
    )


def _declared(name: str, kind: Any) -> tuple[str, ...]:
    """The names of an option; a budget may be given without its unit."""
    flag = flag_of(name)
    if kind is bool:
        return (f"{flag}/--no-{flag.removeprefix('--')}",)
    if flag.endswith(_BUDGET):
        return flag, flag.removesuffix("-bytes")
    return (flag,)


def _help(detail: Field, default: Any) -> str:
    words = [detail.help]
    if detail.choices:
        words.append(f"({', '.join(detail.choices)})")
    if default is None:
        words.append(f"[default: {detail.optional_text}]")
    elif default is not dataclasses.MISSING and default != "":
        words.append(
            f"[default: {'on' if default is True else 'off' if default is False else default}]"
        )
    return " ".join(words)
