"""Owns layered validation: inspect, shard, verify, serve, smoke, in order, ending at the first that
fails.

Each layer leaves its evidence in the report; what each one checks is known elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.accept.questions import ask_questions
from firstlight.accept.report import Check, Report, Section
from firstlight.accept.service import StartedService
from firstlight.accept.smoke import SmokeSettings, run_smoke
from firstlight.accept.weight_reports import inspect_report, shard_report, verify_report
from firstlight.checkpoint.progress import Progress, silent
from firstlight.errors import FirstlightError
from firstlight.planning.audit import EXACT, Compared
from firstlight.units import format_bytes

LAYERS = ("inspect", "shard", "verify", "serve", "smoke", "ask", "stop")


@dataclass(frozen=True)
class UpSettings:
    """What to bring up and how. `questions` are asked through the chat API and their answers shown.

    `serve_flags` go to `firstlight serve` as they are. `store` is made when it is not there yet.
    """

    model: Path
    store: Path
    questions: tuple[str, ...] = ()
    profile: str = "unknown"
    dtype: str = "keep"
    serve_flags: tuple[str, ...] = ()
    question_tokens: int = 128


@dataclass
class _Run:
    """What the layers so far have found."""

    settings: UpSettings
    progress: Progress
    say: Callable[[str], None]
    sections: list[Section] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def add(self, layer: str, report: Report) -> bool:
        """Takes in a layer's report; says whether to go on."""
        failed = report.failed
        first = failed[0] if failed else None
        detail = f"{first.name}: {first.detail}" if first else _summary(report)
        fix = first.fix if first else ""
        self.checks.append(Check(layer, "fail" if first else "ok", detail, fix))
        self.sections += _titled(layer, report)
        self.data[layer] = dict(report.data)
        return first is None


def run_up(
    settings: UpSettings,
    *,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Brings a model up layer by layer and returns the report of all of them.

    A layer that fails ends the run; those after it are listed as not run. `say` hears what begins.
    """
    run = _Run(settings, progress, say)
    _weights(run) and _service(run)
    for layer in LAYERS[len(run.checks) :]:
        run.checks.append(Check(layer, "unknown", "not run: an earlier layer failed"))
    return Report("firstlight up", tuple(run.sections), tuple(run.checks), run.data)


def _weights(run: _Run) -> bool:
    return all(_attempt(run, layer, work) for layer, work in _WEIGHT_LAYERS)


def _attempt(run: _Run, layer: str, work: Callable[[_Run], Report]) -> bool:
    run.say(f"{LAYERS.index(layer) + 1}/{len(LAYERS)} {layer}")
    try:
        return run.add(layer, work(run))
    except FirstlightError as error:
        check = Check(layer, "fail", str(error))
        return run.add(layer, Report(layer, checks=(check,)))


def _inspect(run: _Run) -> Report:
    from firstlight.adapt.inspect import inspect_path

    return inspect_report(inspect_path(run.settings.model))


def _shard(run: _Run) -> Report:
    from firstlight.accept.convert import convert

    settings = run.settings
    made = convert(settings.model, settings.store, dtype=settings.dtype, progress=run.progress)
    return shard_report(made)


def _verify(run: _Run) -> Report:
    from firstlight.adapt.verify import verify_store

    return verify_report(verify_store(run.settings.store, progress=run.progress))


_WEIGHT_LAYERS: tuple[tuple[str, Callable[[_Run], Report]], ...] = (
    ("inspect", _inspect),
    ("shard", _shard),
    ("verify", _verify),
)


def _service(run: _Run) -> bool:
    with StartedService(run.settings.store, ("--port", "0", *run.settings.serve_flags)) as service:
        layers: Sequence[tuple[str, Callable[[_Run], Report]]] = (
            ("serve", lambda r: _serve(r, service)),
            ("smoke", lambda r: _smoke(r, service)),
            ("ask", lambda r: _ask(r, service)),
            ("stop", lambda r: _stop(service)),
        )
        return all(_attempt(run, layer, work) for layer, work in layers)


def _serve(run: _Run, service: StartedService) -> Report:
    startup = service.wait_ready(lambda phase: run.say(f"    {phase}"))
    facts: Mapping[str, Any] = startup.get("facts", {})
    phases = startup["phases"]
    rows = tuple(
        (p["parent"], p["name"], float(p["began"]), float((p["ended"] or p["began"]) - p["began"]))
        for p in phases
    )
    answers = str(facts.get("known_answers", "not checked"))
    proven = answers.startswith("known answers hold")
    metrics = service.metrics()
    checks = (
        Check("ready", "ok", f"after {max(row[2] + row[3] for row in rows):.1f} s"),
        Check("start-up gate", "ok" if proven else "warn", answers),
        *memory_checks(metrics),
    )
    lines = (
        f"weights {format_bytes(float(facts.get('weights_bytes', 0)))}, "
        f"KV cache {format_bytes(float(facts.get('kv_bytes_per_rank', 0)))} a rank "
        f"for {facts.get('kv_tokens', 0)} tokens",
        f"resident memory of the ranks {format_bytes(float(facts.get('ranks_resident_bytes', 0)))}",
        *(f"memory {line}" for line in str(facts.get("memory_audit", "")).splitlines()),
        *(f"kernel {line}" for line in str(facts.get("kernels", "")).splitlines()),
    )
    timeline = Section(
        "start-up timeline", lines, columns=("process", "phase", "began s", "took s"), rows=rows
    )
    data = {"startup": startup, "memory": memory_rows(metrics)}
    return Report("serve", (timeline,), checks, data)


def memory_checks(metrics: str) -> tuple[Check, ...]:
    """Compares predicted with actual bytes of every component that /metrics lists.

    What follows from rules alone must agree; what was estimated and is off is a warning.
    """
    predicted = _component_bytes(metrics, "memory_predicted_bytes")
    actual = _component_bytes(metrics, "memory_actual_bytes")
    checks = []
    for component, planned in predicted.items():
        one = Compared(component, int(planned), int(actual.get(component, 0.0)))
        text = one.text.partition(": ")[2]
        is_exact = component.partition("/")[0] in EXACT
        status = "ok" if not one.is_off else "fail" if is_exact else "warn"
        checks.append(Check(f"memory of {component}", status, text))  # type: ignore[arg-type]
    return tuple(checks)


def memory_rows(metrics: str) -> list[dict[str, Any]]:
    """Planned and measured bytes of every component that /metrics plans for."""
    predicted = _component_bytes(metrics, "memory_predicted_bytes")
    actual = _component_bytes(metrics, "memory_actual_bytes")
    return [
        {"component": name, "planned": planned, "measured": actual.get(name, 0.0)}
        for name, planned in predicted.items()
    ]


def _component_bytes(metrics: str, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if name in line and 'component="' in line and not line.startswith("#"):
            component = line.split('component="', 1)[1].split('"', 1)[0]
            found[component] = float(line.rsplit(" ", 1)[1])
    return found


def _smoke(run: _Run, service: StartedService) -> Report:
    return run_smoke(SmokeSettings(base_url=service.base_url, profile=run.settings.profile))


def _ask(run: _Run, service: StartedService) -> Report:
    settings = run.settings
    return ask_questions(service.base_url, settings.questions, settings.question_tokens)


def _stop(service: StartedService) -> Report:
    code = service.stop()
    status = "ok" if code == 0 else "fail"
    detail = f"drained, exit code {code}"
    return Report("stop", checks=(Check("shutdown", status, detail),))  # type: ignore[arg-type]


def _titled(layer: str, report: Report) -> list[Section]:
    sections = list(report.sections)
    if report.checks:
        sections.append(Section("", checks=report.checks))
    return [
        Section(
            f"{layer}: {s.title}" if s.title else layer,
            s.lines,
            s.steps,
            s.columns,
            s.rows,
            s.checks,
        )
        for s in sections
    ]


def _summary(report: Report) -> str:
    counts = len(report.all_checks)
    warned = sum(check.status == "warn" for check in report.all_checks)
    held = "1 check holds" if counts == 1 else f"{counts} checks hold"
    return held + (f", {warned} with a warning" if warned else "")
