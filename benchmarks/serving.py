"""Asks how fast and how lean serving SmolLM2-135M in fp32 on two cores is, beside its peers.

Knows nothing of what the sides do inside. All sides get the same token ids in turns in one run:
real text, distinct for each request, so that no prefix cache helps.

    python benchmarks/serving.py --model HF_FOLDER --store STORE [--vllm-python PATH] [--write]
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.limits import Limits, read_shapes
from peers.machine import describe_machine, measure_limits, thread_environment
from peers.serving_page import render
from peers.sides import ServerCommand, ServerSide, Side, Timing, TransformersSide
from peers.workload import Corpus

from firstlight.errors import FirstlightError

OURS = "firstlight"
PAGES = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
DEFAULT_COMMAND = "firstlight serve {store} --port {port}"


@dataclass(frozen=True, slots=True)
class Question:
    """One load: so many prompts at once, so long, so many tokens out."""

    key: str
    batch: int
    prompt_tokens: int
    output_tokens: int


QUESTIONS = (
    Question("one stream", 1, 128, 64),
    Question("32 at once", 32, 128, 64),
    Question("long prefill", 1, 4000, 1),
)
WARM_UP = Question("warm-up", 2, 128, 8)


@dataclass(slots=True)
class Measured:
    """What one side did."""

    ready_seconds: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)

    def walls(self, key: str) -> list[float]:
        """Wall seconds of each repeat."""
        return [timing.wall for timing in self.timings[key]]

    def decode_rates(self, key: str) -> list[float]:
        """Decode tokens/s of each repeat that has one."""
        rates = (timing.decode_tokens_per_second for timing in self.timings[key])
        return [rate for rate in rates if rate is not None]


def main() -> None:
    """Runs the benchmark and prints its page; with --write it is kept in docs/benchmarks."""
    options = parse(sys.argv[1:])
    passive = options.passive_waiting
    machine = {**describe_machine(), "threads": options.threads, "passive_waiting": passive}
    limits_found = measure_limits(options.threads, passive=passive)
    corpus = Corpus(options.model)
    sides = build_sides(options, corpus)
    try:
        measured = measure(sides, corpus, options.repeats)
    except FirstlightError as problem:
        raise SystemExit(f"the benchmark stopped: {problem}") from None
    machine["load_average_after"] = describe_machine()["load_average"]
    limits = Limits(
        read_shapes(options.model), limits_found["gemm_flops"], limits_found["read_bytes"]
    )
    data = gather(options, measured, limits, {**machine, **limits_found})
    page = render(data)
    print(page)
    if options.write:
        PAGES.mkdir(parents=True, exist_ok=True)
        (PAGES / "serving.md").write_text(page)
        (PAGES / "serving.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="HF folder: peers, tokenizer")
    parser.add_argument("--store", type=Path, help="firstlight store; without it, peers only")
    parser.add_argument("--firstlight-command", default=DEFAULT_COMMAND)
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--passive-waiting", action="store_true", help="idle threads sleep: for a shared machine"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-bytes", type=int, default=0, help="KV memory firstlight was given")
    parser.add_argument("--vllm-kv-gib", type=int, default=1, help="KV memory vLLM is given")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"keep the page in {PAGES}")
    return parser.parse_args(arguments)


def build_sides(options: argparse.Namespace, corpus: Corpus) -> list[Side]:
    """The sides in the order in which they take turns: ours first when there is a store."""
    sides: list[Side] = []
    environment = thread_environment(options.threads, passive=options.passive_waiting)
    if options.store:
        port = free_port()
        text = options.firstlight_command.format(store=options.store, port=port)
        command = ServerCommand(tuple(shlex.split(text)), port, "/ready", environment)
        sides.append(ServerSide(OURS, command))
    if not options.without_transformers:
        sides.append(
            TransformersSide(options.model, options.threads, corpus.tokenizer, environment)
        )
    if options.vllm_python:
        sides.append(ServerSide("vllm-cpu", vllm_command(options, environment)))
    return sides


def vllm_command(options: argparse.Namespace, environment: dict[str, str]) -> ServerCommand:
    """vLLM on the CPU as its documentation asks for it, prefix cache off as nothing repeats."""
    port = free_port()
    text = (
        f"{options.vllm_python} -m vllm.entrypoints.openai.api_server --model {options.model} "
        f"--dtype float32 --max-model-len 8192 --max-num-seqs 32 --port {port} --host 127.0.0.1 "
        "--no-enable-prefix-caching"
    )
    own = {
        "VLLM_CPU_KVCACHE_SPACE": str(options.vllm_kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": "",
    }
    return ServerCommand(tuple(shlex.split(text)), port, "/health", {**environment, **own})


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(sides: Sequence[Side], corpus: Corpus, repeats: int) -> dict[str, Measured]:
    """Starts all sides, asks every question of each in turns, and stops them."""
    found = {side.name: Measured() for side in sides}
    started: list[Side] = []
    try:
        for side in sides:
            say(f"starting {side.name}")
            found[side.name].ready_seconds = side.start()
            started.append(side)
            found[side.name].memory = side.memory()
        for side in sides:
            say(f"{side.name} is ready after {found[side.name].ready_seconds:.1f} s; warming up")
            ask(side, WARM_UP, corpus, "warm-up")
            prompts = corpus.prompts(8, 64, "agreement")
            found[side.name].answers = [side.answer(prompt, 16) for prompt in prompts]
        for repeat in range(repeats):
            for question in QUESTIONS:
                for side in sides:
                    timing = ask(side, question, corpus, f"{question.key}/{repeat}")
                    found[side.name].timings.setdefault(question.key, []).append(timing)
                    say(f"{repeat + 1}/{repeats} {question.key}: {side.name} {timing.wall:.3f} s")
    finally:
        for side in started:
            side.stop()
    return found


def ask(side: Side, question: Question, corpus: Corpus, salt: str) -> Timing:
    """Asks one question with the prompts of a salt: equal for all sides, new in each repeat."""
    prompts = corpus.prompts(question.batch, question.prompt_tokens, salt)
    timing = side.run(prompts, question.output_tokens)
    expected = question.batch * question.output_tokens
    if timing.num_tokens != expected:
        raise SystemExit(f"{side.name} gave {timing.num_tokens} tokens where {expected} were asked")
    return timing


def say(text: str) -> None:
    """Writes progress."""
    print(text, file=sys.stderr, flush=True)


def gather(
    options: argparse.Namespace,
    measured: dict[str, Measured],
    limits: Limits,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """All numbers of the run as one record for the page and for programs."""
    planned = {OURS: options.kv_bytes, "vllm-cpu": options.vllm_kv_gib * 2**30}
    return {
        "machine": machine,
        "model": options.model.name,
        "repeats": options.repeats,
        "weight_bytes": limits.shapes.weight_bytes,
        "limits": {
            q.key: limits.whole(q.batch, q.prompt_tokens, q.output_tokens) for q in QUESTIONS
        },
        "limit_decode_tokens_per_second": 32 / limits.step(32, 160),
        "sides": {
            name: {
                "ready_seconds": one.ready_seconds,
                "memory": one.memory,
                "planned_kv_bytes": planned.get(name, 0),
                "walls": {q.key: one.walls(q.key) for q in QUESTIONS},
                "decode_tokens_per_second": one.decode_rates("32 at once"),
                "answers": one.answers,
            }
            for name, one in measured.items()
        },
        "ratios": ratios(measured),
    }


def ratios(measured: dict[str, Measured]) -> dict[str, Any]:
    """How many times as fast as each peer ours is, repeat by repeat; empty without ours."""
    if OURS not in measured:
        return {}
    ours = measured[OURS]
    found: dict[str, Any] = {}
    for name, peer in measured.items():
        if name == OURS:
            continue
        rows = {
            q.key: [p / o for o, p in zip(ours.walls(q.key), peer.walls(q.key), strict=True)]
            for q in QUESTIONS
        }
        ours_rates, peer_rates = ours.decode_rates("32 at once"), peer.decode_rates("32 at once")
        rows["decode"] = [o / p for o, p in zip(ours_rates, peer_rates, strict=False)]
        rows["ready"] = [peer.ready_seconds / ours.ready_seconds]
        found[name] = {key: spread(values) for key, values in rows.items() if values}
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
