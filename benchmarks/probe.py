"""Asks whether two device profiles that `firstlight probe` makes one after the other agree.

Owns runs in pairs and the page; what is measured and how is the command's own.

    python benchmarks/probe.py [--pairs 3] [--threads 1] [--folder .] [--write]

Figures are medians, and so is what is said of a pair: wanted are at most 10 % between the two runs,
and at most 60 s for a profile. Fails when that does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "probe.md"
APART, SECONDS = 0.10, 60.0
ASK = ("-m", "firstlight.cli.main", "probe", "--measure", "--json")


def main() -> int:
    """Measures, prints and writes; returns 1 when a pair is further apart than wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--write", action="store_true", help=f"keep the page in {PAGE}")
    given = parser.parse_args()
    flags = ("--threads", str(given.threads), "--folder", given.folder)
    runs = []
    for number in range(2 * given.pairs):
        runs.append(one_run(flags))
        print(f"run {number + 1}: profile {runs[-1]['took_seconds']:.1f} s", file=sys.stderr)
    text = page(runs, flags)
    print(text)
    if given.write:
        PAGE.write_text(text, encoding="utf-8")
    worst = max(apart(pair) for row in figures(runs).values() for pair in pairs_of(row))
    return int(worst > APART or max(run["took_seconds"] for run in runs) > SECONDS)


def one_run(flags: tuple[str, ...]) -> dict[str, Any]:
    """The curves of one run, and the seconds of the whole command as `command_seconds`."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *ASK, *flags], stdout=subprocess.PIPE, text=True)
    took = time.perf_counter() - began
    curves: dict[str, Any] = json.loads(done.stdout)["data"]["curves"]
    return curves | {"command_seconds": took}


def figures(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What each run found, by the name of the figure."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in named(run):
            found.setdefault(name, []).append(value)
    return found


def named(run: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Rates in G a second, times of sums in us."""
    rows = [
        (f"{dtype} product {side}, GFLOP/s", value / 1e9)
        for dtype, curve in run["products"].items()
        for side, value in curve.items()
    ]
    for word, key in (("copy", "memory"), ("copy from the host", "host")):
        rows += [(f"{word} of {int(n) >> 20} MiB, GB/s", v / 1e9) for n, v in run[key].items()]
    rows += [(f"storage {name}, GB/s", v / 1e9) for name, v in run["storage"].items()]
    sums = run["collective_seconds"].items()
    return rows + [(f"sum of 2 ranks, {int(n) >> 10} KiB, us", v * 1e6) for n, v in sums]


def pairs_of(values: list[float]) -> list[tuple[float, float]]:
    """The runs that came one after the other."""
    return list(zip(values[::2], values[1::2], strict=True))


def apart(pair: tuple[float, float]) -> float:
    """The difference, relative to the smaller."""
    return max(pair) / min(pair) - 1


def page(runs: list[dict[str, Any]], flags: tuple[str, ...]) -> str:
    """The page in Markdown."""
    profile = max(run["took_seconds"] for run in runs)
    whole = max(run["command_seconds"] for run in runs)
    rows = figures(runs)
    worst = max(apart(pair) for row in rows.values() for pair in pairs_of(row))
    heads = [f"run {number + 1}" for number in range(len(runs))]
    lines = [
        "# Two probes of one machine",
        "",
        f"Written by `benchmarks/probe.py --write`. {runs[0]['device']}, {runs[0]['cores']} cores; "
        f"`firstlight probe --measure {' '.join(flags)}`, {len(runs)} times one after the other, "
        "nothing else running. Every figure is a median of rounds spread over the run; with one "
        "thread processor time counts.",
        "",
        f"Wanted: two runs agree within {APART:.0%}, and a profile takes at most {SECONDS:.0f} s. "
        f"Found: at most {worst:.1%} between the runs of a pair; at most {profile:.0f} s for a "
        f"profile, {whole:.0f} s for the whole command with its checks.",
        "",
        "| figure | " + " | ".join(heads) + " | furthest pair |",
        "| --- |" + " ---: |" * (len(heads) + 1),
    ]
    for name, row in rows.items():
        values = " | ".join(f"{value:,.3g}" for value in row)
        lines.append(f"| {name} | {values} | {max(map(apart, pairs_of(row))):.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
