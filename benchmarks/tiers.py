"""What cache beyond the device is worth: a warm hit and a swap.

Owns the questions and the report. A small Llama (the layers of SmolLM2-135M, fewer of them, random
values) is served by the engine's own objects in one process; the clock is the wall's.

    python benchmarks/tiers.py [--only host,disk,swap] [--prefix 30000] [--swap 8192]
                               [--layers 2] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

# isort: split
from firstlight.cache.far_pool import FarSizes
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

PAGE = 16


def make_model(folder: Path, layers: int, context: int) -> None:
    """Writes a Llama with the layers of SmolLM2-135M."""
    changes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": layers,
        "max_position_embeddings": context,
    }
    write_checkpoint(folder, tiny_config("smollm2", **changes))


def first_token(engine: LocalEngine, prompt: list[int]) -> float:
    """Seconds from the submission of a prompt to its first token."""
    began = time.perf_counter()
    request = engine.submit(prompt, greedy(1))
    while not engine.outcomes[request].token_ids:
        engine.step()
    return time.perf_counter() - began


class Warm(NamedTuple):
    """Seconds to the first tokens of prompts never seen and of prompts whose pages lie in a tier;
    tokens found of each of these, their bytes, and bytes a second that the place itself gives.
    """

    cold: list[float]
    warm: list[float]
    num_found: int
    num_bytes: int
    place_rate: float


def warm_hits(folder: Path, length: int, place: str, repeats: int) -> Warm:
    """Measures prompts that come again after another one has taken all pages of the device, which
    then go out as the first one's come in.
    """
    pages = length // PAGE + 2
    far = FarSizes(4 * pages, 0) if place == "host" else FarSizes(0, 4 * pages)
    engine = make_engine(folder, pages + 40, length + 64, far)
    prompts = random_prompts(*[length] * (repeats + 1), below=45)
    cold, warm, found = [first_token(engine, prompts[0])], [], 0
    for before, prompt in pairwise(prompts):
        cold.append(first_token(engine, prompt))
        request = engine.submit(before, greedy(1))
        began = time.perf_counter()
        while not engine.outcomes[request].token_ids:
            engine.step()
        warm.append(time.perf_counter() - began)
        found = engine.outcomes[request].num_cached
    assert engine.tiers is not None
    size = found // PAGE * engine.tiers.unit_bytes[0]
    rate = memory_rate(size) if place == "host" else disk_rate(size)
    engine.tiers.close()
    return Warm(cold, warm, found, size, rate)


def memory_rate(size: int) -> float:
    """Bytes a second of copies in memory by one thread."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return size / (time.perf_counter() - began)


def disk_rate(size: int) -> float:
    """Bytes a second of reads by one thread, 1 MiB at a time, of a file that was just written."""
    piece = np.ones(1024**2, np.uint8)
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(size // piece.nbytes):
            file.write(piece.data)
        file.seek(0)
        began, done = time.perf_counter(), 0
        while got := file.readinto(piece.data):
            done += got
    return done / (time.perf_counter() - began)


class Swapped(NamedTuple):
    """Seconds from where a preempted request can go on to its next token, its tokens, and how many
    preemptions left their state in a tier.
    """

    seconds: float
    tokens: list[int]
    num_swaps: int


def swapped(folder: Path, length: int, far: FarSizes | None) -> Swapped:
    """Measures a preempted request.

    It yields to one that grows, and loses its pages to another of its length.
    """
    engine = make_engine(folder, length // PAGE + 10, length + 512, far)
    low, tall, high = random_prompts(length, 64, length, below=45)
    victim = engine.submit(low, greedy(120), priority=1)
    while len(engine.outcomes[victim].token_ids) < 8:
        engine.step()
    grower = engine.submit(tall, greedy(150))
    while engine.outcomes[grower].finish is None:
        engine.step()
    assert engine.scheduler.counts.preemptions, "nobody was preempted"
    engine.submit(high, greedy(1))
    while engine.scheduler.counts.finished.get("length", 0) < 2:
        engine.step()
    known, began = len(engine.outcomes[victim].token_ids), time.perf_counter()
    while len(engine.outcomes[victim].token_ids) == known:
        engine.step()
    seconds = time.perf_counter() - began
    while engine.step():
        pass
    if engine.tiers is not None:
        engine.tiers.close()
    return Swapped(seconds, engine.outcomes[victim].token_ids, engine.scheduler.counts.swaps)


def make_engine(folder: Path, blocks: int, context: int, far: FarSizes | None) -> LocalEngine:
    """An engine with so many pages on the device."""
    shape = EngineShape(
        num_blocks=blocks,
        block_size=PAGE,
        max_sequences=4,
        max_batch_tokens=512,
        chunk_tokens=512,
        context_length=context,
        far=() if far is None else (far,),
        tier_folder=tempfile.mkdtemp(),
    )
    return LocalEngine(folder, shape, fast_kernels())


def report_warm(folder: Path, length: int, place: str, repeats: int) -> None:
    """Prints a row of the first table."""
    found = warm_hits(folder, length, place, repeats)
    cold, warm = statistics.median(found.cold), statistics.median(found.warm)
    text = f"first token, {length} tokens, {found.num_found} found on {place}"
    print(f"| {text} | {cold:.2f} s | {warm:.3f} s | {cold / warm:.0f} |")
    rate, whole = found.num_bytes / warm / 1e9, found.place_rate / 1e9
    seconds = ", ".join(f"{one:.3f}" for one in found.warm)
    print(f"{seconds} s; {rate:.2f} GB/s of the {whole:.1f} of {place}, {rate / whole:.0%}")


def report_swaps(folder: Path, length: int, repeats: int) -> None:
    """Prints the rows of preempted requests, whose tokens must be the same with and without."""
    pages = 4 * length // PAGE
    places = {"": None, "host": FarSizes(pages, 0), "disk": FarSizes(0, pages)}
    runs = {
        name: [swapped(folder, length, far) for _ in range(repeats)] for name, far in places.items()
    }
    want = runs[""][0].tokens
    slow = statistics.median(run.seconds for run in runs.pop(""))
    for place, found in runs.items():
        same = all(run.tokens == want and run.num_swaps for run in found)
        assert same, "the swapped request differs, or was not swapped"
        quick = statistics.median(run.seconds for run in found)
        text = f"next token after a preemption at {length}, {place}"
        print(f"| {text} | {slow:.2f} s | {quick:.3f} s | {slow / quick:.0f} |", flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="host,disk,swap")
    parser.add_argument("--prefix", type=int, default=30_000)
    parser.add_argument("--swap", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    parts = asked.only.split(",")
    print("| question | computed anew | from the tier | ratio |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, asked.layers, max(asked.prefix, asked.swap) + 1024)
        for place in ("host", "disk"):
            if place in parts:
                report_warm(folder, asked.prefix, place, asked.repeats)
        if "swap" in parts:
            report_swaps(folder, asked.swap, asked.repeats)


if __name__ == "__main__":
    main()
