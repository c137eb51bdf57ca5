"""Asks how far the planner is from what this machine does: times and memory of loads held out.

Knows nothing of how predictions are made. Every load is served by an engine of its own. Figures of
the machine are fitted to some loads; others are predicted from these alone.

    python benchmarks/planner.py measure --store NAME=STORE ... --keep FILE [--threads 2]
    python benchmarks/planner.py speed --keep FILE
    python benchmarks/planner.py judge --keep FILE [--write]

`measure` goes on where FILE ends, so that it can be run in pieces (`--most 6` loads at a time).
`speed` times what the planner itself does with the real Kimi K3: search and rehearsals.
With --write the numbers go to docs/benchmarks/planner.json, from which
`python scripts/planning_guides.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from firstlight.accept.bench import run_bench
from firstlight.accept.bench_settings import BenchSettings
from firstlight.accept.client import Endpoint
from firstlight.accept.service import StartedService
from firstlight.errors import FirstlightError
from firstlight.models.spec import ModelSpec
from firstlight.planning.arrangement import Arrangement
from firstlight.planning.calibrate import Machine, Observation, fit
from firstlight.planning.constants import EXPECTED
from firstlight.planning.hardware import Fleet
from firstlight.planning.host_profile import measure_host
from firstlight.planning.rates import rates_of
from firstlight.planning.work import model_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.runner.model_path import read_spec
from firstlight.sharding.layout import Layout

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "planner.json"
CHUNK, BATCH, BLOCK = 256, 512, 16
LEAST_REQUESTS = 8
K3 = str(PAGE.parent.parent.parent / "tests" / "data" / "k3" / "full")
_FULL = ("--context", "1M", "--concurrency", "16", "--images", "4")
COMMANDS = {
    "plan for 64 devices": ("plan", K3, "--devices", "64xS5000@8", *_FULL),
    "rehearsal of 64 ranks": ("up", K3, "--rehearse", "--devices", "64xS5000@8", *_FULL),
    "rehearsal of 1,024 ranks": ("up", K3, "--rehearse", "--devices", "1024xS5000@8", *_FULL),
}
# Memory of a step does not depend on time: these components are compared beside TTFT and TPOT.
COMPONENTS = ("weights", "packed", "kv", "recurrent", "framework", "activations", "resident")


@dataclass(frozen=True)
class Shape:
    """A load: prompt and answer tokens, requests in flight."""

    prompt: int
    output: int
    concurrency: int

    @property
    def text(self) -> str:
        """The load in a word."""
        return f"{self.prompt} in, {self.output} out, {self.concurrency} at once"

    def load(self) -> Workload:
        """The load as plans have it."""
        return Workload(
            context=self.prompt + self.output,
            concurrency=self.concurrency,
            input_tokens=self.prompt,
            output_tokens=self.output,
        )


FITTED = tuple(
    Shape(*one)
    for one in ((32, 32, 1), (384, 32, 1), (128, 32, 4), (256, 64, 2), (64, 64, 8), (448, 16, 4))
)
HELD_OUT = tuple(
    Shape(*one)
    for one in (
        *((48, 48, 1), (128, 64, 1), (256, 32, 1), (440, 24, 1)),
        *((64, 32, 2), (200, 40, 2), (400, 32, 2), (96, 64, 4)),
        *((224, 32, 4), (352, 24, 4), (48, 48, 8), (160, 32, 8)),
    )
)


@dataclass(frozen=True)
class Measured:
    """What one load took: medians of its requests, and bytes of rank 0 planned and measured."""

    ttft: float
    tpot: float
    planned: dict[str, int]
    held: dict[str, int]


def main() -> int:
    """Measures, or prints the errors; with --write they are kept."""
    options = parse(sys.argv[1:])
    kept = read(options.keep)
    try:
        if options.what == "measure":
            measure(options, kept)
            return 0
        if options.what == "speed":
            kept["speed"] = [timed(name, words) for name, words in COMMANDS.items()]
            options.keep.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            return 0
    except FirstlightError as problem:
        raise SystemExit(f"the benchmark stopped: {problem}") from None
    models = [judge(name, kept["models"][name]) for name in kept["models"]]
    print(json.dumps({m["name"]: m["errors"] for m in models}, indent=1))
    if options.write:
        data = {"machine": kept["machine"], "speed": kept.get("speed", []), "models": models}
        PAGE.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "speed", "judge"))
    parser.add_argument("--keep", type=Path, required=True, help="file of what was measured")
    parser.add_argument("--store", action="append", default=[], help="NAME=STORE, repeatable")
    parser.add_argument("--threads", type=int, default=1, help="of a rank; clients need a core")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each one in flight")
    parser.add_argument("--most", type=int, default=1 << 20, help="loads to measure, then end")
    parser.add_argument("--write", action="store_true", help=f"keep the numbers in {PAGE}")
    return parser.parse_args(arguments)


def read(path: Path) -> dict[str, Any]:
    """Returns what was measured so far."""
    if not path.exists():
        return {"machine": "", "models": {}}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def measure(options: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Measures the loads that are missing, and keeps each at once."""
    kept["machine"] = machine_text(options.threads)
    left = options.most
    for named in options.store:
        name, store = named.split("=", 1)
        model = kept["models"].setdefault(name, {"store": store, "loads": {}})
        spec = read_spec(Path(store))
        for shape in (*FITTED, *HELD_OUT):
            if shape.text in model["loads"] or not left:
                continue
            model["loads"][shape.text] = asdict(run(shape, store, spec, options))
            options.keep.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            left -= 1
            say(f"{name}, {shape.text}")


def timed(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Runs a command to its end; returns its seconds and the most memory it held."""
    command = [sys.executable, "-m", "firstlight.cli.main", *words]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    found = {"name": name, "seconds": time.perf_counter() - began, "bytes": used.ru_maxrss * 1024}
    say(f"{name}: {found['seconds']:.1f} s, {found['bytes'] / 2**20:,.0f} MiB")
    return found


def machine_text(threads: int) -> str:
    """The machine in a line, with what else it was doing."""
    load = os.getloadavg()[0]
    return f"{platform.processor() or platform.machine()}, {threads} threads, load {load:.1f}"


def judge(name: str, model: dict[str, Any]) -> dict[str, Any]:
    """Fits the machine's figures to some loads and predicts the others."""
    spec = read_spec(Path(model["store"]))
    rules = PlanRules(dtype="float32", chunk_tokens=CHUNK, max_batch_tokens=BATCH, block_size=BLOCK)
    machine = Machine(model_work(spec, "float32"), Arrangement(Layout()), rules)
    loads = {text: Measured(**found) for text, found in model["loads"].items()}
    seen = [(shape, loads[shape.text]) for shape in FITTED if shape.text in loads]
    observed = [Observation(shape.load(), m.ttft, m.tpot) for shape, m in seen]
    rates = rates_of(Fleet(1, measure_host(), 1), EXPECTED, "float32")
    fitted = fit(machine, replace(rates, measured=True), observed)
    rows = []
    for shape in (shape for shape in HELD_OUT if shape.text in loads):
        predicted = machine.speed(fitted, shape.load())
        rows.append(row(shape, (predicted.ttft, predicted.tpot), loads[shape.text]))
    return {
        "name": name,
        "rates": {
            "memory": fitted.memory,
            "matrix": fitted.matrix,
            "kernel": fitted.constants.kernel,
            "host": fitted.constants.host,
        },
        "fitted": [{"shape": asdict(shape), "ttft": m.ttft, "tpot": m.tpot} for shape, m in seen],
        "rows": rows,
        "errors": summary(rows),
    }


def run(shape: Shape, store: str, spec: ModelSpec, options: argparse.Namespace) -> Measured:
    """Serves one load on a service of its own."""
    context = str(shape.prompt + shape.output + 1)
    flags = (
        *("--port", "0", "--context", context, "--max-sequences", str(shape.concurrency)),
        *("--chunk-tokens", str(CHUNK), "--max-batch-tokens", str(BATCH), "--skip-gate"),
        *("--block-size", str(BLOCK), "--threads", str(options.threads)),
    )
    with StartedService(Path(store), flags) as service:
        service.wait_ready(lambda phase: None)
        settings = BenchSettings(
            endpoint=Endpoint(service.base_url, ""),
            num_requests=max(LEAST_REQUESTS, options.rounds * shape.concurrency),
            concurrency=shape.concurrency,
            input_tokens=shape.prompt,
            output_tokens=shape.output,
            token_ids=(3, spec.vocab_size - 64),
            warmup_requests=shape.concurrency,
        )
        records = [r for r in run_bench(settings).records if not r.failure]
        text = service.metrics()
    times = [(r.ttft, r.tpot) for r in records if r.ttft is not None and r.tpot is not None]
    if not times:
        raise SystemExit(f"no request of {shape.text} succeeded")
    return Measured(
        statistics.median(t for t, _ in times),
        statistics.median(t for _, t in times),
        component_bytes(text, "memory_predicted_bytes"),
        component_bytes(text, "memory_actual_bytes"),
    )


def component_bytes(metrics: str, name: str) -> dict[str, int]:
    """Bytes of rank 0 by component, from the text of /metrics."""
    found = {}
    for component in COMPONENTS:
        mark = f'{name}{{component="{component}/0"}}'
        for line in metrics.splitlines():
            if mark in line:
                found[component] = int(float(line.rsplit(" ", 1)[1]))
    return found


def row(shape: Shape, predicted: tuple[float, float], found: Measured) -> dict[str, Any]:
    """One load: predicted and measured, and the errors as shares of what was measured."""
    errors = {
        "ttft": predicted[0] / found.ttft - 1,
        "tpot": predicted[1] / found.tpot - 1,
        **{name: size / max(1, found.held[name]) - 1 for name, size in found.planned.items()},
    }
    return {
        "shape": asdict(shape),
        "predicted": {"ttft": predicted[0], "tpot": predicted[1], **found.planned},
        "measured": {"ttft": found.ttft, "tpot": found.tpot, **found.held},
        "errors": errors,
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median, ninth decile and worst of the absolute errors of each metric."""
    found: dict[str, dict[str, float]] = {}
    for name in ("ttft", "tpot", *COMPONENTS):
        sizes = sorted(abs(r["errors"][name]) for r in rows if name in r["errors"])
        if sizes:
            found[name] = {
                "median": statistics.median(sizes),
                "p90": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
                "worst": sizes[-1],
            }
    return found


def say(text: str) -> None:
    """Writes progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
