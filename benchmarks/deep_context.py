"""One sequence far longer than the device, against the same sequence with everything on the device.

Owns the questions, the two sides and what is measured of them; the page is `deep_context_page`'s.
The bundled k3-mini reads a list of `key=value` among lines of numbers and is asked about keys from
its beginning to its end. The engine's own objects serve it in one process, once with a cache that
holds everything, once within the budgets of device and host and with the rest on disk.

    python benchmarks/deep_context.py RECORDS --length 262144 --side resident
    python benchmarks/deep_context.py RECORDS --length 262144 --side tiered
    python benchmarks/deep_context_page.py RECORDS

and so on for other lengths, and with --attention sparse=64x32. Each call adds a file to the folder
RECORDS; those beyond 100,000 tokens take a quarter of an hour and more. In small, for trying:
--length 8192 --chunk 512 --device-bytes 4MiB --host-bytes 1MiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

# isort: split
import torch
from blake3 import blake3

from firstlight.assembly.source import open_source
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import cache_needs, plan_caches
from firstlight.models.spec import ModelSpec, with_attention
from firstlight.planning.tier_sizing import plan_tiers, tier_device_bytes
from firstlight.runner.cache_tensors import state_bytes
from firstlight.schedule.step import StepResult
from firstlight.settings.tiers import parse_tiers
from firstlight.training.recipes.k3_mini import lookup, words
from firstlight.training.recipes.k3_mini.conversations import (
    Conversation,
    Renderer,
    answer,
    question,
)
from firstlight.units import parse_bytes
from local_engine import EngineShape, LocalEngine, Outcome, fast_kernels, greedy
from state_digests import state_digests

MODEL = Path(str(files("firstlight") / "data" / "k3_mini"))
PAIRS = 256
MARGIN = 64  # tokens of a question and its answer beside the list
SEQUENCES = 8  # whose recurrent state has a place, and as many snapshots
LATENT_BYTES = 640  # of a token in float32, with its share of a summary


class Asked(NamedTuple):
    """A question about the list: where its pair stands (0 to 1), the whole prompt, the answer."""

    depth: float
    prompt: list[int]
    answer: list[int]


class Material(NamedTuple):
    """The prompt that all questions begin with, and the questions."""

    listed: list[int]
    asked: list[Asked]


@dataclass(frozen=True)
class Setting:
    """What one call does; bytes are those of the tiered side."""

    length: int
    attention: str
    side: str
    page: int
    chunk: int
    questions: int
    device_bytes: int
    host_bytes: int


def make_material(length: int, questions: int) -> Material:
    """Draws the list of a length and questions about keys spread over it; always the same ones."""
    draw, renderer = random.Random(f"deep context {length}"), Renderer(MODEL)
    pairs = lookup.draw_pairs(draw, min(PAIRS, length // 16))
    lines = [f"{name}={number}" for name, number in pairs]
    room = length - MARGIN - len(pairs) * lookup.TOKENS_OF_PAIR
    fillers = [lookup.filler_line(draw) for _ in range(room // lookup.TOKENS_OF_FILLER)]
    places = sorted(draw.randint(0, len(pairs)) for _ in fillers)
    for place, line in zip(reversed(places), fillers, strict=True):
        lines.insert(place, line)
    chosen = [round(i * (len(pairs) - 1) / max(1, questions - 1)) for i in range(questions)]
    first, whole = pairs[chosen[0]], "\n".join(lines)
    example = _prompt(renderer, whole, *first)
    asked = [_about(renderer, example, first, pairs[index]) for index in chosen]
    place = max(i for i, token in enumerate(asked[0].prompt) if token == renderer.single(first[0]))
    return Material(asked[0].prompt[:place], asked)


def _prompt(renderer: Renderer, listed: str, name: str, number: str) -> tuple[list[int], list[int]]:
    text = f"{listed}\n\n{words.WHAT_IS.format(key=name)}"
    talk = Conversation("", [question(text), answer(f"{name}={number}")], thinking=False)
    example = renderer.example(talk)
    first = example.counts.index(True)
    return list(example.tokens[:first]), list(example.tokens[first:])


def _about(
    renderer: Renderer,
    first: tuple[list[int], list[int]],
    named: tuple[str, str],
    pair: tuple[str, str],
) -> Asked:
    """The same list with a question about another pair: only the key's token differs, which is
    proved by a short list.
    """
    old, new = renderer.single(named[0]), renderer.single(pair[0])
    short, other = (_prompt(renderer, "one=1", *one) for one in (named, pair))
    assert _renamed(short[0], old, new) == other[0], "a key changes more than one token"
    prompt = _renamed(first[0], old, new)
    return Asked(prompt.index(new) / len(prompt), prompt, other[1])


def _renamed(prompt: list[int], old: int, new: int) -> list[int]:
    place = max(i for i, token in enumerate(prompt) if token == old)
    return [*prompt[:place], new, *prompt[place + 1 :]]


class WatchedEngine(LocalEngine):
    """An engine that adds up what moved between places, and the time of its steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moved: Counter[str] = Counter()
        self.step_seconds = 0.0

    def _agreed(self, result: StepResult) -> StepResult:
        for flow in result.tiers.flows if result.tiers is not None else ():
            self.moved[f"{flow.place} {'in' if flow.inward else 'out'}"] += flow.num_bytes
        self.step_seconds += result.seconds
        return result

    def device_bytes(self) -> int:
        """Bytes of all that is kept on the device for caches: pages, slots, summaries, staging."""
        readers = {id(far): far for s in self.states if (far := getattr(s, "far", None))}
        staged = sum(reader.staging_bytes for reader in readers.values())
        return state_bytes(self.states) + staged


def make_engine(setting: Setting, folder: str) -> WatchedEngine:
    """An engine of one side; the tiered one is sized as a service with these budgets would be."""
    context = setting.length + 4 * setting.page
    is_tiered = setting.side == "tiered"
    disk = context * LATENT_BYTES * 5 // 4
    tiers = f"host={setting.host_bytes},disk={folder}:{disk}" if is_tiered else ""
    asked = EngineSettings(
        model=str(MODEL),
        started=0.0,
        api_endpoint="",
        engine_endpoint="",
        attention=setting.attention,
        tiers=tiers,
        context_length=context,
        block_size=setting.page,
        max_sequences=SEQUENCES,
        max_batch_tokens=setting.chunk,
        chunk_tokens=setting.chunk,
    )
    needs = cache_needs(asked, _spec(setting, context))
    far = plan_tiers(needs.states, needs.unit_bytes, parse_tiers(tiers))
    beside = tier_device_bytes(needs.states, far, needs.cut)
    budget = setting.device_bytes - beside if is_tiered else 1 << 40
    plan = plan_caches(needs, available=1 << 40, budget=budget)
    blocks = plan.num_blocks if is_tiered else needs.blocks_per_sequence + 2
    shape = EngineShape(
        num_blocks=blocks,
        block_size=setting.page,
        max_sequences=SEQUENCES,
        max_batch_tokens=setting.chunk,
        chunk_tokens=setting.chunk,
        context_length=context,
        num_slots=plan.num_slots,
        attention=setting.attention,
        far=far,
        tier_folder=folder,
    )
    return WatchedEngine(MODEL, shape, fast_kernels())


def _spec(setting: Setting, context: int) -> ModelSpec:
    """The model, allowed to read so many tokens: no layer of it knows positions."""
    spec = open_source(MODEL).spec
    config = replace(spec.config, context_length=context)
    return with_attention(replace(spec, config=config), setting.attention, setting.page)


def read_list(engine: WatchedEngine, prompt: list[int]) -> dict[str, Any]:
    """Reads the list as a request of its own; returns what it took, and the digests of all that is
    kept of it while it still runs.
    """
    before, began = engine.moved.copy(), time.perf_counter()
    name = engine.submit(prompt, greedy(2, logprobs=engine.spec.vocab_size))
    outcome = engine.outcomes[name]
    while not outcome.token_ids:
        engine.step()
    seconds = time.perf_counter() - began
    moved = engine.moved - before
    digests = state_digests(engine, name)
    while outcome.finish is None:
        engine.step()
    return {"seconds": seconds, "moved": moved, "digests": digests, **_said(outcome)}


def ask(engine: WatchedEngine, one: Asked) -> dict[str, Any]:
    """Asks one question; returns whether greedy decoding answers it, and what it took."""
    before, began = engine.moved.copy(), time.perf_counter()
    name = engine.submit(one.prompt, greedy(len(one.answer), logprobs=engine.spec.vocab_size))
    outcome = _finished(engine, name)
    seconds = time.perf_counter() - began
    return {
        "depth": one.depth,
        "right": outcome.token_ids == one.answer,
        "nats": sum(_nats(engine, one, outcome)) / len(one.answer),
        "seconds": seconds,
        "found": outcome.num_cached,
        "moved": engine.moved - before,
        **_said(outcome),
    }


def _nats(engine: WatchedEngine, one: Asked, outcome: Outcome) -> Iterator[float]:
    """Minus the log-probability of each token of the right answer behind those before it; asked
    again token by token where greedy decoding left the right answer.
    """
    for count, token in enumerate(one.answer):
        if outcome.token_ids[:count] == one.answer[:count]:
            found = outcome.logprobs[count]
        else:
            prompt = [*one.prompt, *one.answer[:count]]
            name = engine.submit(prompt, greedy(1, logprobs=engine.spec.vocab_size))
            [found] = _finished(engine, name).logprobs
        yield -dict(found.top)[token]


def _finished(engine: WatchedEngine, name: str) -> Outcome:
    outcome = engine.outcomes[name]
    while outcome.finish is None:
        engine.step()
    assert outcome.error is None, outcome.error
    return engine.outcomes.pop(name)


def _said(outcome: Outcome) -> dict[str, Any]:
    """Tokens, and a digest of the log-probabilities of the whole vocabulary at each of them."""
    told = [sorted(found.top) for found in outcome.logprobs]
    return {"tokens": outcome.token_ids, "logprobs": blake3(repr(told).encode()).hexdigest()}


def status(name: str) -> int:
    """Bytes of a line of this process's status, such as VmHWM."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def measure(setting: Setting) -> dict[str, Any]:
    """Runs one side; returns the record."""
    material = make_material(setting.length, setting.questions)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(setting, folder)
        warm = [3 + i % 1000 for i in range(min(2 * setting.chunk, setting.length // 4))]
        engine.run([warm], greedy(2))
        gc.collect()
        before = status("VmHWM")
        read = read_list(engine, material.listed)
        after_reading = status("VmHWM")
        answers = [ask(engine, one) for one in material.asked]
        engine.scheduler.check_integrity()
        record = {
            **vars(setting),
            "listed": len(material.listed),
            "read": read,
            "answers": answers,
            "moved": engine.moved,
            "lost": engine.scheduler.counts.lost_units,
            "device": engine.device_bytes(),
            "host": 0 if engine.tiers is None else engine.tiers.host_bytes,
            "cached": len(material.listed) * sum(s.token_bytes(1, 4) for s in engine.spec.states),
            "peak": {"warm": before, "read": after_reading, "end": status("VmHWM")},
        }
        if engine.tiers is not None:
            groups = engine.cache.usage().groups
            record["places"] = [[one._asdict() for one in group.far] for group in groups]
            engine.tiers.close()
    return record


def parse(arguments: Sequence[str] | None = None) -> tuple[Path, Setting]:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--attention", default="full")
    parser.add_argument("--side", choices=("resident", "tiered"), required=True)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--device-bytes", type=parse_bytes, default="32MiB")
    parser.add_argument("--host-bytes", type=parse_bytes, default="64MiB")
    given = vars(parser.parse_args(arguments))
    return given.pop("records"), Setting(**given)


def main() -> int:
    """Writes the record of one side."""
    records, setting = parse()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    record = measure(setting)
    records.mkdir(parents=True, exist_ok=True)
    kind = setting.attention.partition("=")[0]
    path = records / f"{kind}-{setting.length}-{setting.side}.json"
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    right, seconds = sum(one["right"] for one in record["answers"]), record["read"]["seconds"]
    print(f"{path.name}: {right} of {setting.questions} right, read in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
