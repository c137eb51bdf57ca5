"""How long do inspect and the map of every rank's reads take at the size of Kimi K3?

Writes the rehearsal checkpoint (96 files, 1.56 TB by their sizes, 127 MiB on the disk) and, for
each layout in a process of its own: inspects it, proves the map, lists the reads of every rank.

    python benchmarks/shard_map.py CONFIG_FOLDER [--folder WHERE] [--write]

--write makes docs/benchmarks/shard-map.md.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from firstlight.adapt.inspect import inspect_path
from firstlight.adapt.rehearsal import write_rehearsal
from firstlight.checkpoint.names import require_match
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.shard_map import ShardMap
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "shard-map.md"
LAYOUTS = {
    "index alone": None,
    "TP8": {"tp": 8},
    "EP8": {"tp": 8, "ep": 8},
    "PP2 x TP8": {"pp": 2, "tp": 8},
    "TP16": {"tp": 16},
}


def peak_mib() -> float:
    """Returns the most memory this program has held; ru_maxrss would tell of who started it."""
    line = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line[1]) / 1024 if line else float("nan")


def measure(folder: Path, degrees: dict[str, int] | None) -> dict[str, float]:
    """Returns seconds and MiB of one layout; None inspects alone."""
    wall, cpu = perf_counter(), process_time()
    report = inspect_path(folder)
    assert report.sound, report.findings[:3]
    inspected, reads = process_time() - cpu, 0
    if degrees is not None:
        checkpoint = open_checkpoint(folder)
        spec = read_model_spec(checkpoint.config())
        mapped = ShardMap(require_match(checkpoint, spec), spec, Layout(**degrees))
        assert mapped.uncovered() == []
        assert mapped.source_bytes().total == report.num_bytes
        for share in mapped.shares:
            counts = [(run.count * run.num_bytes) for run in mapped.runs(share.rank)]
            assert (len(counts), sum(counts)) == (share.tensors, share.num_bytes)
            reads += len(counts)
    return {
        "wall": perf_counter() - wall,
        "cpu": process_time() - cpu,
        "inspect_cpu": inspected,
        "mib": peak_mib(),
        "reads": reads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/shard-map.md")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.config, LAYOUTS[arguments.only])))
        return
    rows = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        started = perf_counter()
        made = write_rehearsal(arguments.config, Path(folder) / "made")
        print(f"written in {perf_counter() - started:.1f} s: {made}")
        for name in LAYOUTS:
            path = arguments.config if name == "index alone" else made.path
            command = [sys.executable, __file__, str(path), "--only", name]
            done = subprocess.run(command, capture_output=True, check=True)
            rows[name] = json.loads(done.stdout)
            print(name, rows[name], flush=True)
    if arguments.write:
        PAGE.write_text(page(rows))


def page(rows: dict[str, dict[str, float]]) -> str:
    """Returns the page."""
    lines = [
        "# Inspecting Kimi K3 and mapping it to ranks at full size",
        "",
        "Made by `python benchmarks/shard_map.py CONFIG_FOLDER --write`: a rehearsal checkpoint "
        "(96 files, 1.56 TB by their sizes, true headers, 497,220 tensors) is inspected, the map "
        "of a layout is proven whole, the reads of every rank are listed. Each row is a program of "
        "its own; the memory is the most it held, Python and its modules included.",
        "",
        f"- {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}",
        "",
        "| what | wall s | CPU s | of it inspect | MiB | reads listed | should be at most | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        seconds, mib = (3, 1024) if name == "index alone" else (20, 1536)
        holds = row["wall"] <= seconds and row["mib"] <= mib
        lines.append(
            f"| {name} | {row['wall']:.1f} | {row['cpu']:.1f} | {row['inspect_cpu']:.1f} "
            f"| {row['mib']:.0f} | {row['reads']:,.0f} | {seconds} s, {mib} MiB "
            f"| {'yes' if holds else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
