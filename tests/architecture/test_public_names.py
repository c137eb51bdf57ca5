"""Freezes what scripts of users rely on: verbs, options, variables and exit codes.

A difference is a decision: change public_names.txt in the same commit, and say it in CHANGELOG.
"""

import inspect
from pathlib import Path

import typer

from firstlight import errors
from firstlight.cli.main import BUG, INTERRUPTED, build_app
from firstlight.settings.serve import ServeSettings
from firstlight.settings.settings import fields_of, variable_of

FROZEN = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    group = typer.main.get_command(build_app())
    lines = []
    for verb, command in group.commands.items():
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            lines.append(f"{verb} {' '.join(names)}" if "--help" not in names else "")
    lines += [f"variable {variable_of(name)}" for name in fields_of(ServeSettings)]
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    lines += [f"exit {kind.exit_code} {kind.__name__}" for kind in kinds]
    lines += [f"exit {INTERRUPTED} interrupted", f"exit {BUG} bug"]
    return sorted(filter(None, lines))


def test_public_names_are_those_frozen():
    assert public_names() == FROZEN.read_text(encoding="utf-8").splitlines()
