"""How fast are stores made and loaded, as a share of what the machine can do?

Makes a checkpoint of random values (4 GiB unless told otherwise) and its store, and compares in
turns, in one run: plain reads of the same files, loading the store, safetensors' own load_file,
runai-model-streamer and fastsafetensors where they are installed; and making the store with cp and
sync. Cold means that no page of the files is in the page cache, which mincore confirms.

    python benchmarks/loading.py FOLDER [--gib 4] [--rounds 3] [--only cold warm ...] [--write]

FOLDER takes the files (8 to 13 GiB) and keeps them for the next call; --write makes the page.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

from loading_page import page
from loading_sides import (
    Kept,
    Side,
    allocate,
    cached_share,
    copy_bytes,
    drop_pages,
    hash_bytes,
    load_store,
    peers,
    plain_read,
)
from random_checkpoint import write_random

from firstlight.adapt.shard import ShardOptions, shard
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import Store, open_store
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.layout import Layout
from firstlight.sharding.rules import REPLICATED

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"
THREADS = (2, 4, 8)


@dataclass(frozen=True)
class Case:
    """The files of a run."""

    source: Path
    store: Store
    spec: ModelSpec
    rounds: int

    @property
    def sources(self) -> list[Path]:
        """The weight files of the checkpoint."""
        return sorted(self.source.glob("*.safetensors"))

    @property
    def units(self) -> list[Path]:
        """The unit files of the store."""
        return [self.store.bin_path(unit.name) for unit in self.store.manifest.units]


def prepare(folder: Path, gib: float, rounds: int) -> Case:
    """Makes checkpoint and store where they are absent."""
    source, target = folder / "model", folder / "store"
    if not (source / "model.safetensors.index.json").exists():
        write_random(source, int(gib * 2**30))
    shard(source, target)
    spec = read_model_spec(json.loads((source / "config.json").read_text()))
    return Case(source, open_store(target), spec, rounds)


def in_turns(
    sides: Mapping[str, Side], rounds: int, before: Callable[[], None]
) -> dict[str, list[float]]:
    """Returns the seconds of every side in every round but the first, which warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            before()
            started = perf_counter()
            kept = side()
            seconds[name].append(perf_counter() - started)
            if isinstance(kept, Kept):
                close = kept.close
                kept.values.clear()
                close()
                del close
            del kept
            gc.collect()
    return {name: times[1:] for name, times in seconds.items()}


def cold(case: Case) -> dict[str, Any]:
    """Loads what the page cache does not hold."""
    shares: list[float] = []

    def drop() -> None:
        drop_pages([*case.units, *case.sources])
        shares.append(cached_share([*case.units, *case.sources]))

    sides: dict[str, Side] = {}
    for threads in THREADS:
        for direct in (False, True):
            name = f"plain read, {threads} threads, {'O_DIRECT' if direct else 'page cache'}"
            sides[name] = lambda t=threads, d=direct: plain_read(case.units, t, direct=d)
    sides["store, digests checked"] = lambda: load_store(case.store, case.spec, check=True)
    sides["store, unchecked"] = lambda: load_store(case.store, case.spec, check=False)
    seconds = in_turns({**sides, **peers(case.sources)}, case.rounds, drop)
    return {"seconds": seconds, "most_cached": max(shares)}


def warm(case: Case) -> dict[str, Any]:
    """Loads what the page cache holds."""
    for path in (*case.units, *case.sources):
        plain_read([path], 2, direct=False)
    num_bytes, processors = sum(p.stat().st_size for p in case.units), os.cpu_count() or 1
    sides: dict[str, Side] = {
        "copy into new memory": lambda: copy_bytes(case.units, processors),
        "hash in memory": lambda: hash_bytes(num_bytes, processors),
        "store, digests checked": lambda: load_store(case.store, case.spec, check=True),
        "store, unchecked": lambda: load_store(case.store, case.spec, check=False),
    }
    return {"seconds": in_turns({**sides, **peers(case.sources)}, case.rounds, lambda: None)}


def conversion(case: Case) -> dict[str, Any]:
    """Makes the store anew, in turns with cp and sync of the source."""
    copy, target = case.source.with_name("copy"), case.source.with_name("again")

    def clear() -> None:
        for folder in (copy, target):
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()

    def plain() -> None:
        subprocess.run(["cp", "-r", str(case.source), str(copy)], check=True)
        os.sync()

    seconds = in_turns({"cp and sync": plain, "shard": lambda: shard(case.source, target)},
                       case.rounds, clear)  # fmt: skip
    clear()
    peaks = {}
    for threads in (1, 2, 8):
        peaks[f"shard, {threads} threads"] = peak(f"make:{threads}", case)
        clear()
    peaks["shard with known answers"] = peak("convert", case)
    clear()
    return {"seconds": seconds, "peak_bytes": peaks}


def ranks(case: Case) -> dict[str, Any]:
    """Counts what one rank of each degree has the system read, beside its share."""
    total = sum(info.num_bytes for info in open_checkpoint(case.source).tensors.values())
    alike = sum(2 * prod(rule.shape) for rule in case.spec.tensors if rule.axis == REPLICATED)
    found = {}
    for degree in (1, 2, 4, 8):
        place = Layout(tp=degree).place(degree - 1)
        parameters, before = allocate(case.spec, place), bytes_asked()
        load_into(parameters, case.store, case.spec, place)
        wanted = (total - alike) / degree + alike
        found[str(degree)] = {"read": bytes_asked() - before, "share": wanted}
    return found


def memory(case: Case) -> dict[str, Any]:
    """Measures what loading takes beyond the weights."""
    weights = sum(path.stat().st_size for path in case.units)
    return {
        "weights": weights,
        "cold": peak("load:cold", case),
        "warm": peak("load:warm", case),
        "torch alone": peak("none", case),
    }


def bytes_asked() -> int:
    """Returns the bytes this program has had read() and its kin return."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def peak(what: str, case: Case) -> int:
    """Does one thing in a program of its own; returns the most memory that held, in bytes."""
    command = [sys.executable, __file__, str(case.source.parent), "--alone", what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def alone(folder: Path, what: str) -> None:
    """Does one thing and prints the most memory it held."""
    verb, _, how = what.partition(":")
    source, target = folder / "model", folder / "again"
    if verb == "make":
        shard(source, target, ShardOptions(threads=int(how)))
    elif verb == "convert":
        from firstlight.accept.convert import convert

        convert(source, target)
    elif verb == "load":
        case = prepare(folder, 0, 0)
        if how == "cold":
            drop_pages(case.units)
        kept = load_store(case.store, case.spec, check=True)
        assert kept[1].digest
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    print(int(line.split()[1]) * 1024)


SECTIONS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "cold": cold, "warm": warm, "conversion": conversion, "ranks": ranks, "memory": memory,
}  # fmt: skip


def main() -> None:
    """Measures the sections asked for; figures of earlier calls stay."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/loading.*")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        alone(arguments.folder, arguments.alone)
        return
    case = prepare(arguments.folder, arguments.gib, arguments.rounds)
    record = (DOCS if arguments.write else arguments.folder) / "loading.json"
    figures = json.loads(record.read_text()) if record.exists() else {}
    figures["bytes"] = sum(path.stat().st_size for path in case.units)
    for name in arguments.only:
        load = os.getloadavg()[0]
        figures[name] = {**SECTIONS[name](case), "load_before": round(load, 2)}
        medians = {
            side: round(statistics.median(times), 3)
            for side, times in figures[name].get("seconds", {}).items()
        }
        print(name, json.dumps(medians or figures[name], indent=1), flush=True)
        record.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.write:
        (DOCS / "loading.md").write_text(page(figures))


if __name__ == "__main__":
    main()
