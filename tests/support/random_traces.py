"""Random requests over time, and engines of every kind that play them.

A trace is made by a seed alone: prompts that begin alike, arrivals and cancels by step, priorities,
salts and cache hints. Knows engines in this process; with several ranks each plays the same trace.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import distinct_specs
from firstlight.parallel.mesh import Mesh
from firstlight.schedule.request import SamplingParams
from firstlight.sharding.layout import Layout
from local_engine import EngineShape, LocalEngine, Outcome, fast_kernels, greedy

PLAIN_IDS = 250  # those of every model here
ROOMY = EngineShape(block_size=4, context_length=256)
CHUNKS = {"max_batch_tokens": 16, "chunk_tokens": 5}
KV_DTYPES = ("auto", "int8")


class Arrival(NamedTuple):
    """A request, the step it comes in, and how many steps later its client leaves (None: never)."""

    step: int
    prompt: list[int]
    params: SamplingParams
    fields: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it
    leaves_after: int | None = None


class Trace(NamedTuple):
    """Requests in order of arrival, those of `long` after all others; the first of them is longer
    than a device of `small` sizes. `far` are units of each cache group beyond it.
    """

    arrivals: list[Arrival]
    long: list[Arrival]
    small: dict[str, int]
    far: FarSizes


@dataclass
class Played:
    """What became of requests in order of arrival, counters, and bytes read by place."""

    outcomes: list[Outcome]
    counts: Any
    num_steps: int
    num_cached: int = 0
    snapshot_hits: int = 0
    read: dict[str, int] = field(default_factory=dict)


def make_trace(seed: int, number: int = 8) -> Trace:
    """Returns requests that fit on a small device alone, and sizes too small for some together."""
    draw = random.Random(seed)
    texts = [_tokens(draw, 64) for _ in range(2)]
    arrivals, step = [], 0
    for index in range(number):
        prompt = texts[draw.random() < 0.3][: draw.choice([1, 9, 24, 33])]
        prompt = prompt + _tokens(draw, draw.choice([0, 1, 3, 9]))
        params = greedy(draw.choice([2, 10, 18, 18]), logprobs=0)
        if index % 4 == 2:
            params = msgspec.structs.replace(params, temperature=1.0, seed=index, top_p=0.95)
        fields = {
            "priority": draw.choice([0, 0, 0, 1, -1]),
            "salt": draw.choice(["", "", "", "", "other"]),
            "cache_hint": draw.choice(["", "", "key"]),
        }
        leaves = draw.choice([1, 4, 9]) if index % 6 == 5 else None
        arrivals.append(Arrival(step, prompt, params, fields, leaves))
        step += draw.choice([0, 0, 0, 0, 1])
    small = {
        "num_blocks": draw.choice([16, 17]),
        "num_slots": draw.choice([6, 7]),
        "max_sequences": 4,
        "max_batch_tokens": draw.choice([24, 32]),
        "chunk_tokens": draw.choice([7, 12]),
    }
    text = _tokens(draw, draw.choice([75, 84]))
    long = [Arrival(0, prompt, greedy(3, logprobs=0)) for prompt in (text, text[:40], [*text, 5])]
    far = FarSizes(draw.choice([5, 9]), draw.choice([60, 90]))
    return Trace(arrivals, long, small, far)


def _tokens(draw: random.Random, number: int) -> list[int]:
    return [draw.randrange(3, PLAIN_IDS) for _ in range(number)]


def salted(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, of which none may reuse what another computed, and none is left."""
    return [
        one._replace(fields={"salt": f"own {number}"}, leaves_after=None)
        for number, one in enumerate(arrivals)
    ]


def play(engine: LocalEngine, arrivals: Sequence[Arrival]) -> Played:
    """Plays requests to their end; when nothing is left to do the next one comes at once."""
    ids: list[str] = []
    step, has_work = 0, False
    while has_work or len(ids) < len(arrivals):
        for one in arrivals[len(ids) :]:
            if has_work and one.step > step:
                break
            ids.append(engine.submit(one.prompt, one.params, **one.fields))
            has_work, step = True, max(step, one.step)
        for request_id, one in zip(ids, arrivals, strict=False):
            if one.leaves_after is not None and step >= one.step + one.leaves_after:
                engine.cancel(request_id)
        has_work = engine.step()
        engine.scheduler.check_integrity()
        step += 1
    return _played(engine, [engine.outcomes[request_id] for request_id in ids], step)


def _played(engine: LocalEngine, outcomes: list[Outcome], num_steps: int) -> Played:
    slots = engine.cache.usage().slots
    return Played(
        outcomes,
        engine.scheduler.counts,
        num_steps,
        num_cached=sum(outcome.num_cached for outcome in outcomes),
        snapshot_hits=slots.hits if slots is not None else 0,
        read={place: size for (place, inward), size in engine.moved.items() if inward},
    )


class Stage:
    """A model on one rank of a layout, and the engines that play on it."""

    def __init__(self, folder: Path, tp: int) -> None:
        rank = dist.get_rank() if tp > 1 else 0
        self._folder, self._kernels = folder, fast_kernels()
        self._mesh = Mesh(Layout(tp=tp).place(rank), dist.group.WORLD if tp > 1 else None)
        self._model: Any = None

    def engine(self, kv_dtype: str, **sizes: Any) -> LocalEngine:
        """Returns an engine; what is not said is roomy."""
        shape = replace(ROOMY, kv_dtype=kv_dtype, **sizes)
        engine = LocalEngine(self._folder, shape, self._kernels, self._model, mesh=self._mesh)
        self._model = engine.model
        return engine

    def play_all(self, trace: Trace, kv_dtype: str, tier_folder: str) -> dict[str, Played]:
        """Plays a trace in every way. `tiered` plays it twice and then the long requests."""
        whole, arrivals = self.engine(kv_dtype), salted(trace.arrivals)
        found = {
            "undisturbed": play(whole, arrivals),
            "long": play(whole, trace.long),
            "hit": play(whole, arrivals),
            "chunked": play(self.engine(kv_dtype, **CHUNKS), arrivals),
            "preempted": play(self.engine(kv_dtype, **trace.small), trace.arrivals),
        }
        groups = len(distinct_specs(whole.spec.states))
        tiered = self.engine(
            kv_dtype, **trace.small, far=(trace.far,) * groups, tier_folder=tier_folder
        )
        twice = [*trace.arrivals, *(one._replace(step=one.step + 1000) for one in trace.arrivals)]
        late = [one._replace(step=2000) for one in trace.long]
        found["tiered"] = play(tiered, [*twice, *late])
        tiered.tiers.close()
        return found

    def scores(self, played: Played, arrivals: Sequence[Arrival], kv_dtype: str) -> list[list[Any]]:
        """Log-probabilities of tokens that were answered, and the likeliest of each place, read at
        once with caches of a type.
        """
        engine = self.engine(kv_dtype)
        pairs = list(zip(arrivals, played.outcomes, strict=True))
        texts = [[*one.prompt, *outcome.token_ids] for one, outcome in pairs]
        told = engine.run(texts, greedy(1, prompt_logprobs=1))
        return [
            outcome.prompt_logprobs[len(one.prompt) - 1 :]
            for one, outcome in zip(arrivals, told, strict=True)
        ]


def play_seed(folder: Path, tp: int, seed: int, tier_folder: str) -> dict[str, Any]:
    """Plays the trace of a seed in every way with caches of every type, on this rank of `tp`.

    By type what `Stage.play_all` gives, and under `scores` by type those of the answers of float
    caches.
    """
    trace, stage = make_trace(seed), Stage(folder, tp)
    found: dict[str, Any] = {kind: stage.play_all(trace, kind, tier_folder) for kind in KV_DTYPES}
    plain = found["auto"]["undisturbed"]
    found["scores"] = {kind: stage.scores(plain, trace.arrivals, kind) for kind in KV_DTYPES}
    return found
