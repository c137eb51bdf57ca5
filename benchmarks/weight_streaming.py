"""What does a step cost when weights may take half the memory they need?

Runs one model whole and within a budget, in turns, and beside them the two things a streamed step
is made of: its reads alone (the same jobs on the same threads into the same buffers, nothing
computed) and its computation alone (the same modules, whose buffers are left as they are). A step
cannot be faster than the larger of the two, nor than both at once with neither waiting for the
other: where they share what they need that is much more. Files are in the page cache; with --cold
they are read past it (O_DIRECT) and have no pages there.

    python benchmarks/weight_streaming.py STORE [--share 0.5] [--tokens 1,64,256] [--threads 1]
        [--readers 1] [--cold] [--rounds 12]
"""

import argparse
import json
import os
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from firstlight.assembly.build import BuildOptions
from firstlight.assembly.source import WeightSource, open_source
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.checkpoint.pieces import PieceKey
from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.layers.packed_batch import PackedBatch
from firstlight.parallel.mesh import Mesh
from firstlight.runner.cache_tensors import CacheShape, allocate_states
from firstlight.runner.residency import Residency, ResidencyLimits, assemble_within
from firstlight.sharding.layout import Layout
from firstlight.sharding.residency import least_budget, rank_weights
from firstlight.sharding.state_spec import RecurrentState
from firstlight.units import format_bytes, format_rate, format_seconds

CPU = torch.device("cpu")
BLOCK = 16


def build(
    source: WeightSource, limits: ResidencyLimits, threads: int
) -> tuple[Any, Residency | None]:
    model, residency = assemble_within(
        limits,
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=builtin_kernels().resolve(machine_query()),
        options=BuildOptions(torch.float32, CPU, 1024, threads=threads),
    )
    assert model.allocated_bytes == model.planned_bytes
    return model.module, residency


def step_of(source: WeightSource, module: Any, tokens: int) -> Callable[[], torch.Tensor]:
    """A first step of one sequence: its tokens through all layers, and the logits of the last."""
    states, pages = source.spec.states, blocks_for(tokens, BLOCK)
    shape = CacheShape(pages + 1, BLOCK, 1, torch.float32, CPU, num_slots=2)
    caches = allocate_states(states, shape)
    one, run = torch.ones(1, 1, dtype=torch.int32), torch.arange(1, pages + 1, dtype=torch.int32)
    tables = [one if isinstance(s, RecurrentState) else run[None] for s in distinct_specs(states)]
    batch = PackedBatch(
        positions_T=torch.arange(tokens),
        bounds=(0, tokens),
        starts_B1=torch.tensor([0, tokens], dtype=torch.int32),
        contexts_B=torch.tensor([tokens], dtype=torch.int32),
        tables=tuple(tables),
    )
    ids_T = torch.arange(tokens) * 7 % source.spec.vocab_size

    @torch.inference_mode()
    def step() -> torch.Tensor:
        carry = module(ids_T, batch, caches)
        last = type(carry)(*(part[-1:] for part in carry))
        out: torch.Tensor = module.head(last)
        return out

    return step


def reads_of(residency: Residency) -> Callable[[], None]:
    """All layers of a step, one after the other, two on their way at a time; nothing computed."""
    feed, plan = residency.feed, residency.plan
    buffers = [torch.empty(plan.buffer_bytes, dtype=torch.uint8) for _ in range(plan.num_buffers)]

    def read() -> None:
        under_way: list[Any] = []
        for number, layer in enumerate(plan.streamed):
            key = PieceKey(layer)
            tensors = feed.image(key).views(buffers[number % len(buffers)])
            if len(under_way) == len(buffers):
                feed.wait(under_way.pop(0))
            check = feed.is_checked(key)
            under_way.append(feed.threads.start(feed.read_jobs(key, tensors, check=check)))
        for reading in under_way:
            feed.wait(reading)

    return read


def both_at_once(
    reads: Callable[[], None], compute: Callable[[], torch.Tensor]
) -> Callable[[], None]:
    """Reads and computation that do not wait for each other: what the machine allows of overlap."""

    def run() -> None:
        reading = threading.Thread(target=reads)
        reading.start()
        compute()
        reading.join()

    return run


def without_reads(module: Any) -> Any:
    """The module with layers that wait for nothing: they compute with what their buffers hold."""
    for layer in module.layers:
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    return module


def drop_pages(source: WeightSource) -> None:
    for path in Path(source.weights.path).rglob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measured(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Wall seconds of each side, in turns, so that a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 2):
        for name, run in sides.items():
            began = perf_counter()
            run()
            if number > 1:
                seconds[name].append(perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--tokens", default="1,64,256")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = open_source(arguments.model)
    table, facts = source.spec.family.table, source.spec.facts
    needed = rank_weights(table, facts, Layout(), 4).num_bytes
    least = least_budget(rank_weights(table, facts, Layout(), 4))
    limits = ResidencyLimits(
        max(least, int(needed * arguments.share)), direct=arguments.cold, threads=arguments.readers
    )
    whole, _ = build(source, ResidencyLimits(None), arguments.threads)
    streamed, residency = build(source, limits, arguments.threads)
    computing, idle = build(source, limits, arguments.threads)
    assert residency is not None and idle is not None, "all weights fit: nothing is streamed"
    without_reads(computing)
    print(
        f"{source.spec.family.name}, {format_bytes(needed)} of weights within "
        f"{format_bytes(limits.budget_bytes or 0)}: {len(residency.plan.streamed)} of "
        f"{facts.num_layers} layers streamed, {residency.plan.num_slots} slots for experts; "
        f"{arguments.threads} threads compute, {arguments.readers} read, "
        f"load average {os.getloadavg()[0]:.1f}, "
        f"{'direct reads, pages dropped' if arguments.cold else 'files in the page cache'}"
    )
    for tokens in map(int, arguments.tokens.split(",")):
        if arguments.cold:
            drop_pages(source)
        sides: dict[str, Callable[[], object]] = {
            "resident": step_of(source, whole, tokens),
            "compute": step_of(source, computing, tokens),
            "reads": reads_of(residency),
            "streamed": step_of(source, streamed, tokens),
        }
        sides["both"] = both_at_once(reads_of(residency), step_of(source, computing, tokens))
        same = torch.equal(sides["resident"](), sides["streamed"]())  # type: ignore[arg-type]
        residency.take_traffic()
        sides["streamed"]()
        traffic = residency.take_traffic()
        report(measured(sides, arguments.rounds), tokens, traffic, same)


def report(seconds: dict[str, list[float]], tokens: int, traffic: Any, same: bool) -> None:
    """Prints medians, and the streamed step as a multiple of the larger of its two halves."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    limit = max(medians["reads"], medians["compute"])
    moved = traffic.file_bytes + traffic.host_bytes
    experts = traffic.expert_hits + traffic.expert_misses
    print(
        f"{tokens:5} tokens: "
        + ", ".join(f"{name} {format_seconds(value)}" for name, value in medians.items())
        + f"; {format_bytes(moved)} a step ({format_rate(moved, medians['streamed'])}); streamed "
        f"is {medians['streamed'] / limit:.2f}x max(reads, compute), "
        f"{medians['streamed'] / medians['both']:.2f}x both at once; logits the same: {same}"
        + (f"; experts hit {traffic.expert_hits} of {experts}" if experts else "")
    )
    print(json.dumps({name: [round(t, 5) for t in times] for name, times in seconds.items()}))


if __name__ == "__main__":
    main()
