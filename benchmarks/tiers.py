"""What cache beyond the device is worth: a warm hit, a swap, and the bookkeeping of a step.

Owns the questions and the report. A small Llama (the layers of SmolLM2-135M, fewer of them, random
values) is served by the engine's own objects in one process; the clock is the wall's.

    python benchmarks/tiers.py [--prefix 30000] [--swap 8192] [--layers 4] [--rounds 300]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

# isort: split
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import CacheManager
from firstlight.schedule.request import SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import SampledToken, StepPlan, StepResult
from firstlight.sharding.state_spec import GroupedQueryState
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

PAGE = 16
RUNNING = 256


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


def warm_hit(folder: Path, length: int, place: str) -> tuple[float, float, int]:
    """Seconds to the first token of a prompt that was never seen, and when its pages lie in a tier;
    tokens of it that were found there.
    """
    pages = length // PAGE + 2
    far = FarSizes(2 * pages, 0) if place == "host" else FarSizes(0, 2 * pages)
    engine = make_engine(folder, pages + 40, length + 64, far)
    prompt, other = random_prompts(length, length, below=45)
    cold = first_token(engine, prompt)
    first_token(engine, other)  # takes the device's pages
    request = engine.submit(prompt, greedy(1))
    began = time.perf_counter()
    while not engine.outcomes[request].token_ids:
        engine.step()
    warm = time.perf_counter() - began
    engine.tiers.close()
    return cold, warm, engine.outcomes[request].num_cached


def swapped(folder: Path, length: int, far: FarSizes | None) -> tuple[float, list[int], int]:
    """Seconds from where a preempted request can go on to its next token, its tokens, and how many
    preemptions left their state in a tier.

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
    return seconds, engine.outcomes[victim].token_ids, engine.scheduler.counts.swaps


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


def bookkeeping(rounds: int, has_tiers: bool) -> list[float]:
    """Seconds of schedule and update of each step in which 256 requests write answers."""
    far = (FarSizes(20_000, 100_000),) if has_tiers else ()
    spec = GroupedQueryState(8, 128)
    options = CacheOptions(unit_bytes=(1,), far=far)
    cache = CacheManager(
        [spec], num_blocks=40_000, block_size=PAGE, model_digest="m", options=options
    )
    limits = SchedulerSettings(
        max_sequences=RUNNING,
        max_batch_tokens=8192,
        chunk_tokens=2048,
        max_waiting=1000,
        context_length=8192,
    )
    scheduler = Scheduler(limits, cache)
    gc.freeze()  # as the engine does before it serves
    for number in range(RUNNING):
        prompt = [(number * 7 + i) % 1000 for i in range(512)]
        params = SamplingParams(max_tokens=4000)
        scheduler.add(SubmittedRequest(request_id=f"r{number}", prompt_ids=prompt, params=params))
    times: list[float] = []
    while len(times) < rounds:
        began = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        result = answer(plan)
        answered = time.thread_time()
        scheduler.update(result)
        if len(plan.steps) == plan.num_tokens == RUNNING:
            times.append(time.thread_time() - answered + planned - began)
    return times


def answer(plan: StepPlan) -> StepResult:
    """What ranks would say."""
    tokens = [SampledToken(step.row, 5, None) for step in plan.steps if step.sample]
    return StepResult(plan.step, tokens, [], [], 0.01)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=30_000)
    parser.add_argument("--swap", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=300)
    asked = parser.parse_args()
    print("| question | computed anew | from the tier | ratio |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, asked.layers, max(asked.prefix, asked.swap) + 1024)
        for place in ("host", "disk"):
            cold, warm, found = warm_hit(folder, asked.prefix, place)
            text = f"first token, {asked.prefix} tokens, {found} found on {place}"
            print(f"| {text} | {cold:.2f} s | {warm:.3f} s | {cold / warm:.0f} |", flush=True)
        slow, want, _ = swapped(folder, asked.swap, None)
        for place in ("host", "disk"):
            pages = 4 * asked.swap // PAGE
            far = FarSizes(pages, 0) if place == "host" else FarSizes(0, pages)
            quick, tokens, swaps = swapped(folder, asked.swap, far)
            assert tokens == want and swaps, "the swapped request differs, or was not swapped"
            text = f"next token after a preemption at {asked.swap}, {place}"
            print(f"| {text} | {slow:.2f} s | {quick:.3f} s | {slow / quick:.0f} |", flush=True)
    for has_tiers in (False, True):
        times = sorted(bookkeeping(asked.rounds, has_tiers))
        median, high = statistics.median(times), times[int(len(times) * 0.99)]
        kind = "with tiers" if has_tiers else "without"
        print(f"bookkeeping, {RUNNING} running, {kind}: median {median * 1e3:.2f} ms", end=", ")
        print(f"99 % below {high * 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
