"""Owns the verb `up`: flags in, steps on stderr, one report out; the layers are accept's."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.settings.settings import required, resolve_flags, setting

Ask = Annotated[
    list[str] | None, typer.Option(help="question to ask once it serves; may be given again")
]
ServeOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- SERVE_OPTIONS]", help="passed on to `serve`, as they are"),
]


@dataclass(frozen=True, kw_only=True)
class UpFlags:
    """What the verb takes beside questions and the options of `serve`."""

    model: Path = required("checkpoint folder or GGUF file")
    store: Path | None = setting(
        None, "directory of the store, made if not there", optional_text="MODEL.store"
    )
    tp: int = setting(1, "ranks that share each layer", minimum=1)
    dtype: str = setting("keep", "type of weights in the store (keep, fp32, bf16, fp16)")
    profile: str = setting("unknown", "known answers to expect: a bundled profile's name")
    ask_tokens: int = setting(128, "longest answer to a question, in tokens", minimum=1)


@options_from(UpFlags, arguments=("model",))
def up(
    flags: Mapping[str, Any],
    serve_options: ServeOptions = None,
    ask: Ask = None,
    as_json: AsJson = False,
) -> int:
    """Bring a model up: all steps, one report.

    Inspect, shard, verify, serve, smoke and ask, in this order; the first that fails ends it, and
    the report says why. The service is stopped at the end.
    """
    from firstlight.cli.progress import progress_on_stderr
    from firstlight.platforms.torch_check import require_torch

    given = resolve_flags(UpFlags, flags)
    store = given.store or given.model.with_name(f"{given.model.name}.store")
    serve_flags = ("--tp", str(given.tp), *(serve_options or ()))
    _check_serve_flags(store, serve_flags)
    require_torch()
    from firstlight.accept.up import UpSettings, run_up

    settings = UpSettings(
        model=given.model,
        store=store,
        questions=tuple(ask or ()),
        profile=given.profile,
        dtype=given.dtype,
        serve_flags=serve_flags,
        question_tokens=given.ask_tokens,
    )
    with progress_on_stderr() as progress:
        report = run_up(settings, progress=progress, say=_say)
    return show(report, as_json=as_json)


def _check_serve_flags(store: Path, serve_flags: Sequence[str]) -> None:
    """Lets `serve` read its options now: a typing mistake must not show after an hour of work."""
    from firstlight.cli.main import build_app

    arguments = ["serve", str(store), *serve_flags, "--show-settings"]
    with contextlib.redirect_stdout(io.StringIO()):
        build_app()(args=arguments, prog_name="firstlight", standalone_mode=False)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
