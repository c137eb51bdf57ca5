"""What it costs that the blocks of a sequence lie in a row, on recorded requests.

Owns the replay and its report. The engine's own scheduler and cache bookkeeping serve the requests
of `traces/`; the model is a price per step and token, the clock is simulated. What a copy costs
beside a computed token is measured by `--calibrate` with a small Llama of random values.

    python benchmarks/allocators.py [--requests 1000] [--only kimi] [--json FILE] [--calibrate]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

# isort: split
from firstlight.cache.cache_group import GroupUsage
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.manager import CacheManager
from firstlight.schedule.request import SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import SampledToken, StepPlan, StepResult
from firstlight.sharding.state_spec import LatentState

TRACES = Path(__file__).resolve().parent / "traces"
BLOCK = 16
HASHED = 512  # tokens that one hash of Kimi's trace names
# Tokens of answers, and of prompts whose content is not known, are like no other.
FIRST_OWN = 2**31
# A step of a large model on one device: a part that is always there, and one for each token. What a
# copied token costs beside a computed one is what --calibrate finds.
STEP_SECONDS, TOKEN_SECONDS, COPY_SHARE = 0.015, 40e-6, 0.01
# Latents of Kimi K3, 24 layers in bf16.
TOKEN_BYTES = 27_648


class Recorded(NamedTuple):
    """A request of a trace: seconds since the first one, prompt, and tokens of the answer."""

    at: float
    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class Trace:
    """Requests, and cache sizes in tokens that are tight and wide for them."""

    name: str
    read: Callable[[int], list[Recorded]]
    budgets: tuple[int, int]


def read_kimi(most: int) -> list[Recorded]:
    """Kimi's chat service; equal hashes become equal tokens."""
    found = []
    with (TRACES / "kimi-conversation.jsonl").open() as lines:
        for line in list(lines)[:most]:
            row = json.loads(line)
            prompt = [h * HASHED + i for h in row["hash_ids"] for i in range(HASHED)]
            length = row["input_length"]
            found.append(Recorded(row["timestamp"] / 1000, prompt[:length], row["output_length"]))
    return found


def read_azure(name: str) -> Callable[[int], list[Recorded]]:
    """A service in Azure, whose prompts have nothing in common that is known."""

    def read(most: int) -> list[Recorded]:
        found: list[Recorded] = []
        own, began = FIRST_OWN, 0.0
        with (TRACES / name).open() as lines:
            for row in list(csv.DictReader(lines))[:most]:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                began = began or at
                length = int(row["ContextTokens"])
                found.append(
                    Recorded(
                        at - began, list(range(own, own + length)), int(row["GeneratedTokens"])
                    )
                )
                own += length
        return found

    return read


ALL_TRACES = (
    Trace("kimi conversation", read_kimi, (163_840, 524_288)),
    Trace("azure conversation", read_azure("azure-conversation.csv"), (16_384, 49_152)),
    Trace("azure code", read_azure("azure-code.csv"), (16_384, 49_152)),
)


@dataclass
class Report:
    """What a replay showed; shares are 0 to 1, `cpu_ms` milliseconds of bookkeeping per step."""

    trace: str
    allocator: str
    budget_tokens: int
    steps: int
    seconds: float
    requests_held: float
    tokens_held: float
    preemptions: int
    internal: float
    internal_p99: float
    external: float
    external_p99: float
    copied_gb: float
    copied_share: float
    found: float
    computed_tokens: int
    first_token_p50: float
    cpu_ms: float
    cpu_ms_p99: float


class Replay:
    """One trace through one scheduler and one cache."""

    def __init__(self, requests: Iterable[Recorded], budget_tokens: int, allocator: str) -> None:
        self.requests = list(requests)
        longest = max(len(r.prompt) + r.num_output for r in self.requests)
        self.cache = CacheManager(
            [LatentState(8)],
            num_blocks=budget_tokens // BLOCK + 1,
            block_size=BLOCK,
            model_digest="trace",
            # A clock that is always a second on: free runs are counted in every step.
            options=CacheOptions(512, clock=count().__next__, allocator=allocator),
        )
        limits = SchedulerSettings(
            max_sequences=256,
            max_batch_tokens=2048,
            chunk_tokens=512,
            max_waiting=10**6,
            context_length=longest + 1,
        )
        self.scheduler = Scheduler(limits, self.cache)
        self.now, self.own = 0.0, FIRST_OWN + 2**30
        self.first_token: dict[str, float] = {}
        self.cpu: list[float] = []
        self.states: list[tuple[int, GroupUsage]] = []
        self.external: list[float] = []

    def run(self) -> None:
        """Serves everything."""
        ahead = sorted(range(len(self.requests)), key=lambda i: self.requests[i].at, reverse=True)
        while ahead or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, self.requests[ahead[-1]].at)
            while ahead and self.requests[ahead[-1]].at <= self.now:
                self._submit(ahead.pop())
            self._step()
        self.scheduler.check_integrity()

    def _submit(self, index: int) -> None:
        one = self.requests[index]
        params = SamplingParams(max_tokens=max(1, one.num_output))
        self.scheduler.add(
            SubmittedRequest(request_id=str(index), prompt_ids=one.prompt, params=params)
        )

    def _step(self) -> None:
        began = time.process_time()
        plan = self.scheduler.schedule()
        planned = time.process_time() - began
        if plan is None:
            return
        result = self._compute(plan)
        usage = self.cache.usage()
        group = usage.groups[0]
        self.states.append((usage.num_requests, group))
        if group.cached + group.empty:
            self.external.append(1 - group.longest_run / (group.cached + group.empty))
        began = time.process_time()
        updates = self.scheduler.update(result)
        self.cpu.append(planned + time.process_time() - began)
        for update in updates:
            self.first_token.setdefault(update.request_id, self.now)

    def _compute(self, plan: StepPlan) -> StepResult:
        tokens = []
        for step in plan.steps:
            if step.sample:
                self.own += 1
                tokens.append(SampledToken(step.row, self.own, None))
        priced = plan.num_tokens + COPY_SHARE * BLOCK * len(plan.moves)
        seconds = STEP_SECONDS + TOKEN_SECONDS * priced
        self.now += seconds
        return StepResult(plan.step, tokens, [], [], seconds)

    def report(self, trace: str, allocator: str) -> Report:
        """Means over steps."""
        groups = [group for _, group in self.states]
        last = groups[-1]
        internal = [g.unwritten_tokens / (g.used * BLOCK) for g in groups if g.used]
        waits = [at - self.requests[int(key)].at for key, at in self.first_token.items()]
        counts = self.scheduler.counts
        return Report(
            trace,
            allocator,
            last.usable * BLOCK,
            len(self.states),
            round(self.now, 1),
            statistics.fmean(held for held, _ in self.states),
            statistics.fmean(g.used * BLOCK - g.unwritten_tokens for g in groups),
            counts.preemptions,
            statistics.fmean(internal),
            share_below(internal, 0.99),
            statistics.fmean(self.external),
            share_below(self.external, 0.99),
            last.copied * BLOCK * TOKEN_BYTES / 1e9,
            last.copied * BLOCK / counts.computed_tokens,
            last.found_tokens / max(1, last.asked_tokens),
            counts.computed_tokens,
            statistics.median(waits),
            1000 * statistics.fmean(self.cpu),
            1000 * share_below(self.cpu, 0.99),
        )


def share_below(values: list[float], share: float) -> float:
    """The value that so large a share of all is not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def show(reports: list[Report]) -> None:
    """Prints a table a trace and budget."""
    print(
        "| trace | cache, tokens | allocator | requests at once | tokens held | preempted | "
        "internal, p99 | external, p99 | copied | of computed | found | computed | first token | "
        "time | CPU a step, p99 |"
    )
    print("| " + "--- | " * 15)
    for r in reports:
        print(
            f"| {r.trace} | {r.budget_tokens:,} | {r.allocator} | {r.requests_held:.1f} "
            f"| {r.tokens_held:,.0f} | {r.preemptions} "
            f"| {r.internal:.1%}, {r.internal_p99:.1%} | {r.external:.0%}, {r.external_p99:.0%} "
            f"| {r.copied_gb:,.1f} GB | {r.copied_share:.0%} | {r.found:.1%} "
            f"| {r.computed_tokens:,} | {r.first_token_p50:.2f} s | {r.seconds:,.0f} s "
            f"| {r.cpu_ms:.2f}, {r.cpu_ms_p99:.2f} ms |"
        )


def calibrate(layers: int = 4, pages: int = 64) -> tuple[float, float]:
    """Seconds to compute a token in a chunk of a prompt, and to copy one to another page."""
    from firstlight.runner.page_copies import copy_pages, layers_by_group
    from firstlight.schedule.step import UnitCopy
    from local_engine import EngineShape, LocalEngine, fast_kernels, greedy, random_prompts
    from tiny_models import tiny_config, write_checkpoint

    folder = Path(tempfile.mkdtemp())
    changes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    changes |= {"num_key_value_heads": 3, "num_hidden_layers": layers}
    write_checkpoint(folder, tiny_config("smollm2", **changes, max_position_embeddings=4096))
    shape = EngineShape(num_blocks=4 * pages, chunk_tokens=512, context_length=4096)
    engine = LocalEngine(folder, shape, fast_kernels())
    computing, copying = [], []
    for prompt in random_prompts(*[1025] * 6, below=45):
        began = time.perf_counter()
        engine.run([prompt], greedy(1))
        computing.append((time.perf_counter() - began) / 1025)
    layered = layers_by_group(engine.states)
    for _ in range(12):
        copies = [UnitCopy(0, 1 + i, 1 + 2 * pages + i) for i in range(pages)]
        began = time.perf_counter()
        copy_pages(layered, copies)
        copying.append((time.perf_counter() - began) / (pages * BLOCK))
    return statistics.median(computing[1:]), statistics.median(copying[1:])


def main() -> None:
    """Replays and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10**9)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--calibrate", action="store_true")
    given = parser.parse_args()
    if given.calibrate:
        computed, copied = calibrate()
        print(f"a token computed {computed * 1e6:.1f} us, copied {copied * 1e6:.2f} us")
        return
    reports = []
    for trace in ALL_TRACES:
        if given.only not in trace.name:
            continue
        requests = trace.read(given.requests)
        for budget in trace.budgets:
            for allocator in ("paged", "dynamic"):
                replay = Replay(requests, budget, allocator)
                replay.run()
                reports.append(replay.report(trace.name, allocator))
                print(asdict(reports[-1]), file=sys.stderr, flush=True)
    show(reports)
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")


if __name__ == "__main__":
    main()
