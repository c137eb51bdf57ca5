"""Owns the verb `up`: flags in, steps on stderr, one report out; the layers are accept's."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.options import AsJson, options_from
from firstlight.cli.outcome import show
from firstlight.settings.settings import required, resolve_flags, setting

if TYPE_CHECKING:
    from firstlight.accept.report import Report

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
    tp: int | None = setting(
        None, "ranks that share each layer", minimum=1, optional_text="the plan's, else 1"
    )
    plan: Path | None = setting(
        None, "file of `firstlight plan`; its values stand where no other is given"
    )
    dtype: str = setting("keep", "type of weights in the store (keep, fp32, bf16, fp16)")
    profile: str = setting("unknown", "known answers to expect: a bundled profile's name")
    rehearse: bool = setting(False, "go through a start for every rank, loading nothing")
    devices: str | None = setting(
        None, "with --rehearse: fleet to plan for, like 64xS5000@8", optional_text="the plan's"
    )
    context: int | None = setting(
        None, "with --devices: longest sequence", kind="count", optional_text="the model's own"
    )
    concurrency: int = setting(16, "with --devices: sequences at once", minimum=1)
    images: int = setting(0, "with --devices: images in a request", minimum=0)
    html: Path | None = setting(
        None, "also write the report as one HTML file, pictures inside", optional_text="no file"
    )
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
    the report says why. The service is stopped at the end. With --rehearse nothing is loaded: plan,
    load lists, process groups and modules of every rank are gone through on this machine.
    """
    from firstlight.cli.progress import progress_on_stderr
    from firstlight.platforms.torch_check import require_torch

    given = resolve_flags(UpFlags, flags)
    if given.rehearse:
        return show(_rehearsal(given), as_json=as_json)
    store = given.store or given.model.with_name(f"{given.model.name}.store")
    serve_flags = (*_own_serve_flags(given), *(serve_options or ()))
    _check_serve_flags(store, serve_flags)
    require_torch()
    from firstlight.accept.report_page import require_writable, write_page
    from firstlight.accept.up import UpSettings, run_up

    if given.html is not None:
        require_writable(given.html)

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
    if given.html is not None:
        write_page(report, given.html)
        _say(f"report: {given.html}")
    return show(report, as_json=as_json)


def _rehearsal(given: UpFlags) -> Report:
    from firstlight.cli.rehearse import RehearsalAsked, rehearse_start
    from firstlight.platforms.torch_check import require_torch

    require_torch()
    return rehearse_start(
        RehearsalAsked(
            model=given.model,
            plan=given.plan,
            devices=given.devices,
            context=given.context,
            concurrency=given.concurrency,
            images=given.images,
        )
    )


def _own_serve_flags(given: UpFlags) -> tuple[str, ...]:
    """What is passed on to `serve` of this verb's own flags; unset ones leave the plan its say."""
    tp = ("--tp", str(given.tp)) if given.tp is not None else ()
    return (*tp, "--plan", str(given.plan)) if given.plan is not None else tp


def _check_serve_flags(store: Path, serve_flags: Sequence[str]) -> None:
    """Lets `serve` read its options now: a typing mistake must not show after an hour of work."""
    from firstlight.cli.main import build_app

    arguments = ["serve", str(store), *serve_flags, "--show-settings"]
    with contextlib.redirect_stdout(io.StringIO()):
        build_app()(args=arguments, prog_name="firstlight", standalone_mode=False)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
