"""Owns the pages that show the planner's own output: which hardware to take, what a plan looks
like, and how far predictions are from published measurements.

    python scripts/planning_guides.py            writes the pages
    python scripts/planning_guides.py --check    says which are out of date
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from firstlight.accept.plan_report import fleets_report
from firstlight.cli.main import main as command
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.planning.arrangement import Arrangement
from firstlight.planning.constants import EXPECTED, OPTIMISTIC, PESSIMISTIC
from firstlight.planning.cost import CostModel
from firstlight.planning.explain import short_count
from firstlight.planning.fleets import find_fleets
from firstlight.planning.hardware import parse_fleet
from firstlight.planning.memory import plan_memory
from firstlight.planning.predict import Band, forecast, prefill_seconds
from firstlight.planning.rates import rates_of
from firstlight.planning.search import Question, most_sequences
from firstlight.planning.work import ModelWork, model_work
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import Layout
from planner_errors import machine_lines, table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "tests" / "data" / "k3" / "full" / "config.json"
SELECTION = ROOT / "docs" / "guides" / "hardware-selection.md"
PLANNING = ROOT / "docs" / "guides" / "planning.md"
ERRORS = ROOT / "docs" / "benchmarks" / "planner.md"
GIB = 2**30
SCENARIOS = (OPTIMISTIC, EXPECTED, PESSIMISTIC)

ERRORS_HEAD = """# How far the planner is from published measurements of Kimi K3

Made by `python scripts/planning_guides.py`. The constants of the time model come from other
sources, named in `planning/constants.py`; none was fitted to the figures below. Settings that a
source does not give are ours: prompts in chunks of 8192, fp8 caches.
"""
ERRORS_MISSING = """
The prompt rate of one card (pp 16) lies above its band: the model takes prompts to be as fast as
matrix products of that size, and probably too little for the recurrence and the convolutions.

## What fits
"""
SELECTION_HEAD = """# Which hardware for Kimi K3

Made by `python scripts/planning_guides.py` from the planner's own output; ask it for another load
with `firstlight plan MODEL --find-hardware --context 128K --concurrency 16 --images 4`.

Each row is the smallest fleet of one device that holds every sequence at full context with 20 % of
each device kept (`--reserve-share`), bf16 compute and caches. Times are predictions with their band
([how far off they are](../benchmarks/planner.md)); figures of devices and their sources are in
`src/firstlight/planning/hardware.json`. Prices are not known to the planner, and fewer devices come
first.
"""
PLANNING_HEAD = """# Planning a layout

Made by `python scripts/planning_guides.py`; the output below is the command's own, on the real
config of Kimi K3. `plan` reads the config alone: no weights, no device, no torch.

* Weights are exact, from the rule table; caches as the engine's allocator rounds them.
* `--reserve-share` (20 %) of each device is kept for framework and driver; a model that reads
  images keeps `--encoder-cache-bytes` (256 MiB) for features of images.
* Caches are of the compute type, or of `--cache-dtype`; `serve` has int8, and fp8 where the
  platform has it.
* `--attention` and `--tiers` are those of `serve` ([long context](long-context.md)): see below.
* Times are predictions: expected, and between which ends they may lie. A figure that a vendor did
  not publish is a range and widens the band.
* `--plan-path` keeps the plan as JSON, `--picture` draws it, `--emit` gives launch settings,
  `--rehearse` goes through every rank's load.

## From a plan to a start

```
firstlight plan MODEL --devices 8xB300 --tp 8 --plan-path plan.json
firstlight serve MODEL --plan plan.json
firstlight up MODEL --plan plan.json
firstlight up MODEL --rehearse --plan plan.json
```

* The plan's values stand where no flag, variable or settings file sets another; `--show-settings`
  names the plan as their origin. A plan of another model or degree is refused, and so is one that
  `serve` has no option for.
* A start is refused by the sentence the plan is refused with, before a weight is read.
  `--memory-bytes` gives both the memory of a device.
* Every start is audited: weights, packed weights, caches and recurrent state when they are
  allocated; features of images as they are kept; framework, activations and resident memory at the
  largest step so far. More than 3 %
  off is named in the timeline, in `/startup` and by `up`; `memory_predicted_bytes` and
  `memory_actual_bytes` in `/metrics` have both numbers. A store keeps them in `audit/starts.jsonl`,
  and the next start takes what the framework took from there.
* `up --rehearse` makes the plan, load lists, process groups and modules of every rank on this
  machine, without weights or devices, and says which checks would fail. Ranks of equal shapes are
  built once.

## Longer than the device

```
firstlight plan MODEL --devices 16xH200@8 --context 1M --tiers host=64GiB --block-size 64
firstlight plan MODEL --devices 16xH200@8 --context 1M --attention "0-3: full; *: sparse=64x32"
```

* Each plan says what one sequence of full length takes on a rank: windows at their size,
  block-sparse attention with the summaries it chooses by.
* Without tiers a device holds every sequence at full length. With them it holds as much as one
  sequence needs there and gives the rest of its memory to caches too; the plan says how many
  sequences of full length then run at once. Beside one that is longer than the device only short
  ones run.
* `tiers` is what they take on the device: buffers, and with block-sparse attention the summaries of
  every page of every tier. Large tiers of small pages take gigabytes.
* `times of state beyond`: the next token of a sequence of full length, for which full attention
  reads all that lies elsewhere and block-sparse attention what it chooses; and the first token of a
  prompt found in a tier beside that of one computed anew. Pages and their layers cost time beside
  their bytes: larger pages (`--block-size`) are read faster. Rates are the device's own link to the
  host, `--storage-rate` and what reading threads check and copy (`planning/constants.py`).
* With tiers latent attention takes one form wherever pages lie, which reads prompts longer than
  without; `predicted` counts that.
* Windows are those of `--chunk-tokens`: a sequence holds its window and what one step computes.
"""

LOADS = (
    ("short chats", Workload(context=32 * 1024, concurrency=8)),
    ("documents with images", Workload(context=128 * 1024, concurrency=16, images=4)),
    ("many users", Workload(context=64 * 1024, concurrency=128, images=1)),
    ("a million tokens", Workload(context=1024 * 1024, concurrency=16, images=4)),
)
_ASKED = ("--concurrency", "16", "--images", "4")
EXAMPLES = (
    ("8 S5000: does not fit", "8xS5000@8", _ASKED),
    ("16 S5000: does not fit", "16xS5000@8", _ASKED),
    ("64 S5000, a million tokens", "64xS5000@8", (*_ASKED, "--emit", "sglang")),
    (
        "16 H200, a million tokens beyond the device",
        "16xH200@8",
        ("--concurrency", "4", "--tiers", "host=64GiB", "--block-size", "64"),
    ),
    (
        "16 H200, the same with chosen blocks",
        "16xH200@8",
        (
            *("--concurrency", "4", "--tiers", "host=64GiB", "--block-size", "64"),
            *("--attention", "sparse=64x32"),
        ),
    ),
    (
        "8 B300, with 15 % kept and fp8 caches",
        "8xB300",
        ("--concurrency", "1", "--images", "4", "--reserve-share", "0.15", "--cache-dtype", "fp8"),
    ),
)


@dataclass(frozen=True)
class Compared:
    """A published figure of Kimi K3 and what the planner says, in the figure's unit."""

    what: str
    source: str
    measured: float
    predicted: Band
    unit: str

    @property
    def error(self) -> float:
        """How far the expected value is off, as a share of what was measured."""
        return self.predicted.expected / self.measured - 1


@dataclass(frozen=True)
class Fit:
    """A published statement on what fits, and the largest concurrency the planner finds."""

    what: str
    published: str
    sequences: int
    agrees: bool


@dataclass(frozen=True)
class Claim:
    """What somebody published on what fits: between `least` and `most` sequences of `context`.

    `kept` is what the recipe leaves of each device.
    """

    fleet: str
    layout: Layout
    context: int
    kept: float
    published: str
    least: int
    most: int
    cache_bytes: int | None = None


ANY = 1 << 20
CLAIMS = (
    Claim(
        *("16xH200", Layout(tp=16), 32768, 0.15),
        *("few: 5 at most (vLLM recipe)", 1, 8),
    ),
    Claim(
        *("16xH200", Layout(tp=16), 32768, 0.2),
        *("out of memory (vllm-project/recipes#698)", 0, 0),
    ),
    Claim("8xB300", Layout(tp=8), 1 << 20, 0.15, "fits (vLLM and SGLang recipes)", 1, ANY, 1),
    Claim("8xMI325X", Layout(tp=8), 32768, 0.1, "fits (vllm-project/vllm#50817)", 1, ANY),
    Claim("8xMI355X", Layout(tp=8), 32768, 0.2, "fits (recipes)", 1, ANY),
    Claim("8xH200", Layout(tp=8), 32768, 0.03, "no recipe below 16 cards", 0, 0),
    Claim("8xMI300X", Layout(tp=8), 32768, 0.03, "takes 2 machines", 0, 0),
    Claim("8xB200", Layout(tp=8), 32768, 0.03, "takes 2 machines", 0, 0),
    Claim("32xH100", Layout(tp=32), 32768, 0.1, "fits (recipes)", 1, ANY),
)


def spec_of_k3() -> ModelSpec:
    """Returns the real Kimi K3."""
    return read_model_spec(json.loads(CONFIG.read_text(encoding="utf-8")))


def compared(work: ModelWork) -> tuple[Compared, ...]:
    """Returns every published number beside its prediction.

    The recipes' own settings are used: fp8 caches, prompts in chunks of 8192.
    """
    return (
        _weights(work),
        _tpot(work, 1, 1, 8.51),
        _tpot(work, 64, 8, 40.2),
        _prefill(work, Layout(tp=16), 1652),
        _prefill(work, Layout(pp=16), 4550),
    )


def fits(work: ModelWork) -> tuple[Fit, ...]:
    """Returns every published statement on what fits."""
    found = []
    for claim in CLAIMS:
        rules = PlanRules(reserve_share=claim.kept, cache_element_bytes=claim.cache_bytes)
        load = Workload(context=claim.context, concurrency=1, input_tokens=1024)
        fleet, at = parse_fleet(claim.fleet), Arrangement(claim.layout)
        number = most_sequences(work, at, fleet, load, rules)
        what = (
            f"{claim.fleet}, {at.text}, {short_count(claim.context)}, "
            f"{'fp8' if claim.cache_bytes == 1 else 'bf16'} caches, {claim.kept:.0%} kept"
        )
        found.append(Fit(what, claim.published, number, claim.least <= number <= claim.most))
    return tuple(found)


def _weights(work: ModelWork) -> Compared:
    held = sum(work.table.stage_bytes(Layout(tp=8), 0).values()) / GIB
    what = "weights of a rank, 8xMI325X, tp 8"
    return Compared(what, "vllm-project/vllm#50817, log", 192.31, Band(held, held, held), "GiB")


def _tpot(work: ModelWork, concurrency: int, shared: int, measured: float) -> Compared:
    fleet = parse_fleet("8xB300")
    rules = PlanRules(chunk_tokens=8192, max_batch_tokens=16384, cache_element_bytes=1)
    load = Workload(context=16384, concurrency=concurrency)
    memory = plan_memory(work, Arrangement(Layout(tp=8), 1, shared), fleet, load, rules)
    band = forecast(work, memory, fleet, load, rules).tpot
    scaled = Band(band.expected * 1e3, band.low * 1e3, band.high * 1e3)
    what = f"TPOT, 8xB300, tp 8, 8K in, 1K out, concurrency {concurrency}"
    return Compared(what, "SGLang cookbook", measured, scaled, "ms")


def _prefill(work: ModelWork, layout: Layout, measured: float) -> Compared:
    tokens, fleet = 8192, parse_fleet("16xGB200@16")
    found = []
    for known in SCENARIOS:
        model = CostModel(work, Arrangement(layout), rates_of(fleet, known, "bfloat16"), 1)
        found.append(tokens / prefill_seconds(model, tokens, tokens)[1] / 16)
    best, middle, worst = found
    what = f"prompt tokens/s a card, 16xGB200, {Arrangement(layout).text}"
    return Compared(what, "SGLang cookbook", measured, Band(middle, worst, best), "1/s")


def errors_page(work: ModelWork) -> str:
    """Returns the page that compares predictions with published measurements."""
    rows: list[tuple[object, ...]] = []
    for one in compared(work):
        band = one.predicted
        rows.append(
            (
                one.what,
                one.source,
                f"{one.measured:,} {one.unit}",
                _band(band),
                f"{one.error:+.1%}",
                "-" if band.low == band.high else "yes" if band.holds(one.measured) else "no",
            )
        )
    verdicts: list[tuple[object, ...]] = [
        (one.what, one.published, one.sequences, "yes" if one.agrees else "no")
        for one in fits(work)
    ]
    columns = ("what", "published by", "measured", "predicted (band)", "error", "in the band")
    lines = [
        ERRORS_HEAD,
        *table(columns, rows),
        ERRORS_MISSING,
        *table(("fleet", "published", "sequences that fit", "agrees"), verdicts),
        "",
        *machine_lines(),
    ]
    return "\n".join(lines)


def _band(band: Band) -> str:
    if band.low == band.high:
        return f"{band.expected:,.5g}, exact by the rules"
    return f"{band.expected:,.4g} ({band.low:,.4g} .. {band.high:,.4g})"


def selection_page(spec: ModelSpec) -> str:
    """Returns the guide from loads to hardware."""
    lines = [SELECTION_HEAD]
    for title, load in LOADS:
        asked = Question(spec, parse_fleet("1xS5000"), load)
        section = fleets_report(find_fleets(asked)).sections[0]
        images = f", {load.images} images a request" if load.images else ""
        context = load.context // 1024
        lines += [
            f"## {title[0].upper()}{title[1:]}: {context}K x {load.concurrency}{images}",
            "",
            *table(section.columns, [tuple(row) for row in section.rows]),
            "",
        ]
    return "\n".join(lines)


def planning_page() -> str:
    """Returns the guide that shows real output of the verb."""
    lines = [PLANNING_HEAD]
    lines += [example(*one) for one in EXAMPLES]
    return "\n".join(lines)


def example(title: str, fleet: str, more: tuple[str, ...]) -> str:
    """Returns one command and what it prints."""
    words = ["plan", "kimi-k3/config.json", "--devices", fleet, "--context", "1M", *more]
    printed = output(words)
    return "\n".join(
        [f"## {title}", "", "```", f"$ firstlight {' '.join(words)}", printed, "```", ""]
    )


def output(words: list[str]) -> str:
    """Returns what the verb prints, 110 columns wide."""
    os.environ["COLUMNS"] = "110"  # rich asks for it; a terminal's own width must not show
    real = [str(CONFIG) if word == "kimi-k3/config.json" else word for word in words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command(real)
    text = printed.getvalue().replace(str(CONFIG.parent), "kimi-k3")
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def pages() -> dict[Path, str]:
    """Returns every page by its path."""
    spec = spec_of_k3()
    work = model_work(spec, "bfloat16")
    return {ERRORS: errors_page(work), SELECTION: selection_page(spec), PLANNING: planning_page()}


def main() -> int:
    """Writes the pages, or with --check compares them; returns the exit code."""
    made = pages()
    if "--check" in sys.argv[1:]:
        old = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
        print("\n".join(f"out of date: {path.relative_to(ROOT)}" for path in old))
        return 1 if old else 0
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
