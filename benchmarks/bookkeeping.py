"""What scheduler and cache take of a step at 256 running requests, beside all computing.

Owns the loads and the report. No model and no tensor takes part: the answers of ranks are made up,
and the clock is that of this thread's processor time.

    python benchmarks/bookkeeping.py [--rounds 600]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import CacheManager, distinct_specs
from firstlight.planning.tier_sizing import UnitCut, unit_bytes_of
from firstlight.schedule.request import SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import SampledToken, StepPlan, StepResult
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    StateSpec,
)

RUNNING, PAGE, FEWEST = 256, 16, 64
LLAMA: Sequence[StateSpec] = [GroupedQueryState(8, 128)] * 32
KIMI_K3: Sequence[StateSpec] = [RecurrentState(96, 128, 128, 3 * 96 * 128, 3)] * 69 + [
    LatentState(576)
] * 24


@dataclass(frozen=True)
class Load:
    """A cache, and what its requests do. `all_alike`: they are equally long, so that all reach the
    end of a block, and the point of a snapshot, in the same step. `answer` tokens end a request,
    and another takes its place; without they go on.
    """

    name: str
    states: Sequence[StateSpec]
    kv_dtype: str = "auto"
    has_tiers: bool = False
    all_alike: bool = False
    answer: int | None = None


LOADS = (
    Load("grouped query", LLAMA),
    Load("grouped query, INT8", LLAMA, kv_dtype="int8"),
    Load("grouped query, tiers", LLAMA, has_tiers=True),
    Load("Kimi K3's groups, snapshots", KIMI_K3),
    Load("Kimi K3's groups, snapshots, INT8, tiers", KIMI_K3, kv_dtype="int8", has_tiers=True),
    Load("the same, all requests in step", KIMI_K3, "int8", has_tiers=True, all_alike=True),
    Load("the same, two of them end and two begin", KIMI_K3, "int8", True, answer=128),
)


class Bench:
    """A scheduler under one load."""

    def __init__(self, load: Load) -> None:
        cut = UnitCut(PAGE, 1, 2, load.kv_dtype)
        groups = distinct_specs(load.states)
        far = (FarSizes(20_000, 100_000),) * len(groups) if load.has_tiers else ()
        cache = CacheManager(
            groups,
            num_blocks=24_000,
            block_size=PAGE,
            model_digest="m",
            num_slots=2 * RUNNING + 1,
            options=CacheOptions(2048, unit_bytes=unit_bytes_of(load.states, cut), far=far),
        )
        limits = SchedulerSettings(
            max_sequences=RUNNING,
            max_batch_tokens=8192,
            chunk_tokens=2048,
            max_waiting=1000,
            context_length=8192,
        )
        self.scheduler = Scheduler(limits, cache)
        self._load = load
        self._num_made = 0
        for _ in range(RUNNING):
            self._add()

    def times(self, rounds: int) -> Iterator[float]:
        """Yields the seconds of schedule and update, of steps in which all slots write answers or
        are filled again; those before all requests have begun are left out.
        """
        found = 0
        while found < rounds:
            began = time.thread_time()
            plan = self.scheduler.schedule()
            planned = time.thread_time()
            assert plan is not None, "there is nothing to do"
            result = _answer(plan)
            answered = time.thread_time()
            updates = self.scheduler.update(result)
            ended = time.thread_time()
            for update in updates:
                if update.finish is not None:
                    self._add()
            if self.scheduler.counts.received > RUNNING or len(plan.steps) == RUNNING:
                found += 1
                yield ended - answered + planned - began

    def _add(self) -> None:
        number, load = self._num_made, self._load
        self._num_made += 1
        length = 512 if load.all_alike else 448 + number * 7 % 128
        most = 7000 if load.answer is None else load.answer + number % FEWEST
        prompt = [(number * 7 + i) % 1000 for i in range(length)]
        params = SamplingParams(max_tokens=most)
        self.scheduler.add(
            SubmittedRequest(request_id=f"r{number}", prompt_ids=prompt, params=params)
        )


def _answer(plan: StepPlan) -> StepResult:
    """What ranks would say."""
    tokens = [SampledToken(step.row, 5, None) for step in plan.steps if step.sample]
    return StepResult(plan.step, tokens, [], [], 0.01)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    rounds = parser.parse_args().rounds
    print(f"| bookkeeping of a step, {RUNNING} running requests | median | 99 % below | longest |")
    print("| --- | --- | --- | --- |")
    for load in LOADS:
        bench = Bench(load)
        gc.collect()
        gc.freeze()  # as the engine does before it serves
        times = sorted(bench.times(rounds))
        median, high = statistics.median(times), times[int(len(times) * 0.99)]
        shown = " | ".join(f"{value * 1e3:.2f} ms" for value in (median, high, times[-1]))
        print(f"| {load.name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
