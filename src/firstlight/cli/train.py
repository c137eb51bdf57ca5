"""Owns the verb `train`: a recipe into a run that can be stopped and continued, and its report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstlight.cli.options import AsJson
from firstlight.cli.outcome import show

if TYPE_CHECKING:
    from firstlight.accept.report import Report
    from firstlight.training.loop import StepReport
    from firstlight.training.session import SessionReport

Recipe = Annotated[str, typer.Argument(help="recipe: k3-mini", show_default=False)]
Folder = Annotated[
    Path, typer.Argument(help="new folder, or one of a run to continue", show_default=False)
]
Minutes = Annotated[
    float | None, typer.Option("--minutes", help="stop after this long; the run can be continued")
]
Seed = Annotated[int, typer.Option("--seed", help="what chance begins from")]
Threads = Annotated[int, typer.Option("--threads", help="CPU threads of the arithmetic")]

_LINE_STEPS = 100


def train(
    recipe: Recipe,
    folder: Folder,
    minutes: Minutes = None,
    seed: Seed = 0,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> int:
    """Train a small model and export it.

    The state is kept every minute: the same command continues a stopped run.
    """
    import torch

    from firstlight.training.session import run_session

    torch.set_num_threads(threads)
    seconds = None if minutes is None else minutes * 60
    with _steps_on_stderr() as report:
        made = run_session(recipe, folder, seconds=seconds, seed=seed, report=report)
    return show(train_report(recipe, made), as_json=as_json)


def train_report(recipe: str, made: SessionReport) -> Report:
    """Turns where the run stands into the report the command shows."""
    from firstlight.accept.report import Check, Report, Section
    from firstlight.units import format_count, format_seconds

    rate = made.tokens / made.seconds if made.seconds else 0.0
    lines = (
        f"{format_count(made.steps)} steps in {format_seconds(made.seconds)}",
        f"{format_count(made.tokens)} tokens of text, {rate:,.0f} a second",
        f"loss {made.last_loss:.4f}" if made.last_loss is not None else "no step was taken",
    )
    check = Check("checkpoint exported", "ok", str(made.checkpoint))
    if made.checkpoint is None:
        check = Check(
            "checkpoint exported",
            "warn",
            "the run has not come to its end",
            f"firstlight train {recipe} {made.folder} continues it",
        )
    data = {
        "folder": str(made.folder),
        "steps": made.steps,
        "tokens": made.tokens,
        "seconds": made.seconds,
        "loss": made.last_loss,
        "checkpoint": None if made.checkpoint is None else str(made.checkpoint),
    }
    return Report("firstlight train", (Section(str(made.folder), lines),), (check,), data)


@contextmanager
def _steps_on_stderr() -> Iterator[Callable[[StepReport], Any]]:
    """Gives what hears of steps: a bar on a terminal, a line every hundred steps in a log."""
    if not sys.stderr.isatty():
        yield _log_step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, Any] = {}

    def draw(step: StepReport) -> None:
        if step.stage not in tasks:
            tasks[step.stage] = bars.add_task(step.stage, total=step.stage_steps, loss=step.loss)
        bars.update(tasks[step.stage], completed=step.step + 1, loss=step.loss)

    with bars:
        yield draw


def _log_step(step: StepReport) -> None:
    if (step.step + 1) % _LINE_STEPS == 0:
        shares = ", ".join(
            f"{task} {sum(right)}/{len(right)}" for task, right in sorted(step.scores.items())
        )
        sys.stderr.write(f"{step.stage} step {step.step + 1}: loss {step.loss:.4f}; {shares}\n")
