"""Owns the command line: the verbs, and how every way to end becomes an exit code and one line.

Knows no verb's work; importing it imports neither torch nor anything a verb needs to run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

from firstlight.cli import (
    bench,
    bench_long_context,
    export,
    inspect,
    plan,
    probe,
    serve,
    shard,
    smoke,
    train,
    up,
    verify,
    version,
)
from firstlight.cli.options import EXIT_CODES
from firstlight.errors import FirstlightError
from firstlight.settings.settings import debug_wanted

INTERRUPTED = 130
USAGE = 2
BUG = 70
PIPE_CLOSED = 141

# Frozen: scripts of users call these names.
VERBS: dict[str, Callable[..., Any]] = {
    "up": up.up,
    "inspect": inspect.inspect,
    "plan": plan.plan,
    "shard": shard.shard,
    "verify": verify.verify,
    "export": export.export,
    "serve": serve.serve,
    "smoke": smoke.smoke,
    "bench": bench.bench,
    "train": train.train,
    "probe": probe.probe,
    "version": version.version,
}


# Commands of two words; the first is a verb of its own too.
PAIRS: dict[str, Callable[..., Any]] = {"bench long-context": bench_long_context.long_context}


def build_app() -> typer.Typer:
    """Makes the command line with all its verbs."""
    app = typer.Typer(
        name="firstlight",
        help="Bring a just-released model up: from checkpoint to proven service.",
        epilog=EXIT_CODES,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, function in sorted((VERBS | PAIRS).items(), key=_order):
        app.command(name, epilog=EXIT_CODES)(function)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the process's exit code; no traceback leaves it unless asked for."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if " ".join(given[:2]) in PAIRS:
        given[:2] = [" ".join(given[:2])]
    try:
        code = build_app()(
            args=given or ["--help"],
            prog_name="firstlight",
            standalone_mode=False,
        )
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer turns an interrupt into this code
            _say("interrupted")
        return int(code or 0) if given else USAGE
    except BrokenPipeError:
        # The reader has gone; nothing more may be written, not even at interpreter shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except BaseException as problem:
        return _ended(problem)


def _order(named: tuple[str, Callable[..., Any]]) -> int:
    """Commands of two words behind the verb they begin with."""
    return list(VERBS).index(named[0].split()[0])


def _ended(problem: BaseException) -> int:
    if debug_wanted():
        traceback.print_exc()
    if isinstance(problem, (KeyboardInterrupt, typer.Abort)):
        _say("interrupted")
        return INTERRUPTED
    if isinstance(problem, SystemExit):
        return problem.code if isinstance(problem.code, int) else int(problem.code is not None)
    if isinstance(problem, FirstlightError):
        _say(f"error: {problem}")
        return problem.exit_code
    if callable(message := getattr(problem, "format_message", None)):
        # The command line itself could not be understood.
        _say(f"error: {message()}")
        return int(getattr(problem, "exit_code", USAGE))
    _say(
        f"error: a bug in firstlight: {type(problem).__name__}: {problem} "
        "(FIRSTLIGHT_DEBUG=1 shows where; please report it)"
    )
    return BUG


def _say(text: str) -> None:
    sys.stderr.write(f"firstlight: {text.rstrip()}\n")


if __name__ == "__main__":
    raise SystemExit(main())
