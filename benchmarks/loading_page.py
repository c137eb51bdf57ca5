"""The page `docs/benchmarks/loading.md`, made of the figures that `loading.py` took.

Owns which ratios count and what each should reach; refuses to measure anything.
"""

import os
import platform
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from firstlight.units import format_bytes, format_rate, format_seconds

CHECKED, UNCHECKED = "store, digests checked", "store, unchecked"
LOAD_FILE = "safetensors load_file, copied"
OTHERS = ("runai-model-streamer", "fastsafetensors")


class Ratio(NamedTuple):
    """One line of the summary: what was compared, what it reached, what it should reach."""

    what: str
    reached: float
    wanted: float
    upper: bool = False

    @property
    def holds(self) -> bool:
        """Says whether the figure is as good as it should be."""
        return self.reached <= self.wanted if self.upper else self.reached >= self.wanted


def medians(section: Mapping[str, Any]) -> dict[str, float]:
    """Returns the median seconds of each side."""
    return {name: statistics.median(times) for name, times in section["seconds"].items()}


def ratios(figures: Mapping[str, Any]) -> Iterator[Ratio]:
    """Yields what counts, of the sections that were measured."""
    if "cold" in figures:
        times = medians(figures["cold"])
        limit = min(t for name, t in times.items() if name.startswith("plain read"))
        ours = times[CHECKED]
        best = min(times[name] for name in OTHERS if name in times)
        yield Ratio("cold, digests on: share of the fastest plain read", limit / ours, 0.9)
        yield Ratio("cold, digests on: times as fast as the best of the others", best / ours, 1.0)
        yield Ratio("cold, digests on: times as fast as load_file", times[LOAD_FILE] / ours, 1.3)
    if "warm" in figures:
        times = medians(figures["warm"])
        best = min(times[name] for name in (*OTHERS, LOAD_FILE) if name in times)
        both = times["copy into new memory"] + times["hash in memory"]
        yield Ratio("warm, digests off: times as fast as the best", best / times[UNCHECKED], 0.85)
        yield Ratio("warm, digests on: share of 1/(1/copy + 1/hash)", both / times[CHECKED], 0.9)
    if "conversion" in figures:
        times = medians(figures["conversion"])
        peaks = figures["conversion"]["peak_bytes"]
        yield Ratio(
            "shard (keep): share of cp and sync", times["cp and sync"] / times["shard"], 0.9
        )
        for name, peak in peaks.items():
            yield Ratio(f"{name}: peak memory, GiB", peak / 2**30, 1.0, upper=True)
    for degree, row in figures.get("ranks", {}).items():
        if degree.isdigit():
            off = abs(row["read"] / row["share"] - 1)
            yield Ratio(f"bytes a rank of TP {degree} reads: off its share", off, 0.01, upper=True)


def page(figures: Mapping[str, Any]) -> str:
    """Returns the page."""
    lines = [
        "# Making and loading a store",
        "",
        "Made by `python benchmarks/loading.py FOLDER --write`. The sides of a table take turns in "
        "one run; medians count, smallest and largest are in brackets. Values are random bf16 in "
        f"the shape of a Llama, {format_bytes(figures['bytes'])} of them.",
        "",
        f"- {processor()}, {os.cpu_count()} usable; kernel {platform.release()}",
        "- load average before each section: "
        + ", ".join(f"{k} {v['load_before']}" for k, v in figures.items() if k != "bytes"),
        "",
        "| what | reached | should be | |",
        "| --- | --- | --- | --- |",
    ]
    for one in ratios(figures):
        form = ".3f" if one.wanted < 0.1 else ".2f"
        sign = "at most" if one.upper else "at least"
        verdict = "yes" if one.holds else "**no**"
        lines.append(f"| {one.what} | {one.reached:{form}} | {sign} {one.wanted} | {verdict} |")
    for name, title in (
        ("cold", "Cold: no page of the files in the page cache"),
        ("warm", "Warm: all of them in the page cache"),
        ("conversion", "Making the store"),
    ):
        if name in figures:
            lines += ["", f"## {title}", "", *_table(figures[name], figures["bytes"])]
    lines += [*_notes(figures)]
    return "\n".join(lines) + "\n"


def _table(section: Mapping[str, Any], num_bytes: int) -> Iterator[str]:
    yield "| side | seconds | rate |"
    yield "| --- | --- | --- |"
    for name, times in section["seconds"].items():
        middle = statistics.median(times)
        spread = f"{format_seconds(middle)} ({min(times):.2f} to {max(times):.2f})"
        yield f"| {name} | {spread} | {format_rate(num_bytes, middle)} |"


def _notes(figures: Mapping[str, Any]) -> Iterator[str]:
    if "cold" in figures:
        share = figures["cold"]["most_cached"]
        yield ""
        yield (
            f"Before each cold load mincore found {share:.2%} of the pages in memory at most. "
            "Tensors of `runai-model-streamer` and `fastsafetensors` stay in memory of theirs; "
            "firstlight fills the memory of a module. `load_file` maps its files, so its values "
            "are read when they are copied."
        )
    if "memory" in figures:
        row = figures["memory"]
        base, weights = row["torch alone"], row["weights"]
        yield ""
        yield (
            f"Loading held {format_bytes(row['cold'] - weights - base)} (cold) and "
            f"{format_bytes(row['warm'] - weights - base)} (warm) beyond the weights and beyond "
            f"the {format_bytes(base)} of a program that has imported torch."
        )


def processor() -> str:
    """Returns the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()
