"""Owns the verb `serve`: resolves settings and hands them to the launcher.

Knows neither engine nor HTTP; it ends when the service has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from firstlight.cli.options import options_from
from firstlight.settings.serve import ServeSettings
from firstlight.settings.settings import (
    NOTHING_SUGGESTED,
    Resolved,
    Suggested,
    resolve,
    resolve_one,
    settings_file,
)

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", help="JSON file of settings", show_default=False)
]
ShowSettings = Annotated[
    bool, typer.Option("--show-settings", help="print each setting and its origin, then end")
]


@options_from(ServeSettings, arguments=("model",))
def serve(
    flags: Mapping[str, Any], settings: SettingsFile = None, show_settings: ShowSettings = False
) -> int:
    """Serve a model to OpenAI clients.

    MODEL is a store, a checkpoint folder or a GGUF file.

    Each option is also a variable (--max-sequences: FIRSTLIGHT_MAX_SEQUENCES) and a key of the
    settings file; the flag wins over the variable, the variable over the file, the file over the
    plan.
    """
    resolved = resolve_serve(flags, settings)
    if show_settings:
        print("\n".join(resolved.describe()))
        return 0
    from firstlight.cli.launch import launch
    from firstlight.errors import EnvironmentProblem
    from firstlight.platforms.torch_check import torch_problem

    # Only the ranks import torch: this process would pay 2 s and 200 MB for nothing.
    if problem := torch_problem():
        raise EnvironmentProblem(problem)

    return launch(resolved.value)


def resolve_serve(flags: Mapping[str, Any], settings: Path | None) -> Resolved[ServeSettings]:
    """Returns the settings of a service with their origins, those of a plan among them.

    Raises UsageError for a plan that `serve` cannot carry out or that a degree given contradicts.
    """
    file = settings_file(settings)
    plan = resolve_one(ServeSettings, "plan", flags, file)
    return resolve(
        ServeSettings, flags, file=file, suggested=_of_plan(plan) if plan else NOTHING_SUGGESTED
    )


def _of_plan(path: Path) -> Suggested:
    from firstlight.planning.plan_file import read_plan
    from firstlight.planning.start import suggested_settings

    return Suggested(suggested_settings(read_plan(path), str(path)), f"plan {path}")
