"""Owns what users feel of a plan: TTFT, TPOT, tokens a second and the phases of a cold start.

Knows no search. Times are in seconds, each with a band from optimistic to pessimistic software.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.constants import EXPECTED, OPTIMISTIC, PESSIMISTIC
from firstlight.planning.cost import CostModel, Spent, Step
from firstlight.planning.hardware import Fleet
from firstlight.planning.memory import WEIGHTS, MemoryPlan
from firstlight.planning.rates import Rates, rates_of
from firstlight.planning.work import ModelWork
from firstlight.planning.workload import PlanRules, Workload

# Importing torch takes 2.3 s of one core, more where many ranks do it at once.
PROCESS_SECONDS = 5.0
GATE_TOKENS = 64


@dataclass(frozen=True)
class Band:
    """A prediction: what is expected, and between which ends it may lie."""

    expected: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a measured value lies in the band."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Speed:
    """Times of one request under load, and what all requests get together.

    TPOT is `decode` and `host`, and `others`: the prompts of other sequences.
    """

    ttft: float
    tpot: float
    tokens_per_second: float
    prefill: float
    encode: float
    others: float
    decode: Spent


@dataclass(frozen=True)
class Phase:
    """One phase of a cold start."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class Forecast:
    """Everything predicted of a plan's time. `tokens_per_second` are output tokens of the fleet."""

    ttft: Band
    tpot: Band
    tokens_per_second: Band
    expected: Speed
    cold_start: tuple[Phase, ...]


def forecast(
    work: ModelWork, memory: MemoryPlan, fleet: Fleet, workload: Workload, rules: PlanRules
) -> Forecast:
    """Returns the predictions with their bands."""
    speeds = {
        known: speed(work, memory.arrangement, rates_of(fleet, known, rules.dtype), workload, rules)
        for known in (OPTIMISTIC, EXPECTED, PESSIMISTIC)
    }
    best, middle, worst = speeds[OPTIMISTIC], speeds[EXPECTED], speeds[PESSIMISTIC]
    return Forecast(
        ttft=Band(middle.ttft, best.ttft, worst.ttft),
        tpot=Band(middle.tpot, best.tpot, worst.tpot),
        tokens_per_second=Band(
            middle.tokens_per_second, worst.tokens_per_second, best.tokens_per_second
        ),
        expected=middle,
        cold_start=cold_start(memory, fleet, rules, middle),
    )


def speed(
    work: ModelWork,
    arrangement: Arrangement,
    rates: Rates,
    workload: Workload,
    rules: PlanRules,
) -> Speed:
    """Returns the times of requests in a closed loop of `concurrency`, each as long as asked.

    A sequence's token comes once a step; beside decoding, the prompts of the other sequences of
    its part are computed, one whole set within the life of an answer.
    """
    size = rules.cache_element_bytes or work.table.element_bytes
    model = CostModel(work, arrangement, rates, size, rules.kv_dtype)
    sequences = arrangement.sequences_each(workload.concurrency)
    prompt = workload.input_tokens + workload.images * workload.image_tokens
    step, spent = decode_step(model, sequences, prompt + workload.output_tokens / 2)
    encode = encode_seconds(work, rates, workload)
    waiting, busy = prefill_seconds(model, prompt, rules.chunk_tokens)
    busy += encode
    others = (sequences - 1) * busy / workload.output_tokens
    tpot = step + others
    chunks = ceil(prompt / rules.chunk_tokens)
    ttft = encode + waiting + (chunks * step if sequences > 1 else rates.constants.host)
    life = ttft + workload.output_tokens * tpot
    rate = workload.concurrency * workload.output_tokens / life
    return Speed(ttft, tpot, rate, waiting, encode, others, spent)


def decode_step(model: CostModel, sequences: int, past: float) -> tuple[float, Spent]:
    """Returns the time between two tokens of a sequence, and where it goes.

    With stages, sequences are dealt to as many groups as there are stages; a group's next token
    begins when its last has left the last stage.
    """
    stages = model.layout.pp
    each = -(-sequences // stages)
    spent = model.stages(Step(each, each, past))
    host = model.rates.constants.host
    summed = Spent()
    for one in spent:
        summed = summed.plus(one)
    if sequences < stages or stages == 1:
        return summed.total + host, summed
    slowest = max(spent, key=lambda one: one.total)
    return stages * slowest.total + host, Spent().plus(slowest, stages)


def prefill_seconds(model: CostModel, prompt: int, chunk: int) -> tuple[float, float]:
    """Returns how long a prompt takes to pass all stages, and how long it keeps one busy."""
    chunks = ceil(prompt / chunk)
    tokens = ceil(prompt / chunks)
    step = Step(tokens, 1, (chunks - 1) * tokens / 2, prompt=True)
    stages = [one.total for one in model.stages(step)]
    slowest = max(stages)
    return sum(stages) + (chunks - 1) * slowest, chunks * slowest


def encode_seconds(work: ModelWork, rates: Rates, workload: Workload) -> float:
    """Returns the time of a request's images on one device; attention is within an image."""
    vision = work.vision
    if vision is None or not workload.images:
        return 0.0
    patches = workload.image_tokens * vision.patches_per_feature
    attention = 4.0 * vision.blocks * vision.attention_width * patches
    flops = patches * (2.0 * vision.patch_values + attention)
    flops += workload.image_tokens * 2.0 * vision.feature_values
    floor = vision.blocks * 8 * rates.constants.kernel
    return workload.images * max(floor, rates.operation(vision.weight_bytes, flops))


def cold_start(
    memory: MemoryPlan, fleet: Fleet, rules: PlanRules, expected: Speed
) -> tuple[Phase, ...]:
    """Returns the phases from nothing to ready; weights are read once by each rank that holds
    them, and the ranks of one machine share its storage rate.
    """
    arrangement = memory.arrangement
    per_machine: Counter[int] = Counter()
    world = arrangement.layout.world_size
    for replica in range(arrangement.replicas):
        for stage in memory.stages:
            for rank in stage.ranks:
                per_machine[(replica * world + rank) // fleet.machine] += stage.components[WEIGHTS]
    read = max(per_machine.values())
    largest = max(stage.components[WEIGHTS] for stage in memory.stages)
    reading = read / rules.storage_rate
    uploading = largest / fleet.device.host_bandwidth.expected
    gate = expected.ttft + GATE_TOKENS * expected.tpot
    return (
        Phase("start processes", PROCESS_SECONDS, "interpreters, torch, process groups"),
        Phase(
            "load weights",
            max(reading, uploading),
            f"{read / 1e9:.1f} GB a machine at {rules.storage_rate / 1e9:.1f} GB/s"
            if reading > uploading
            else f"{largest / 1e9:.1f} GB to each device",
        ),
        Phase("known answers", gate, f"{GATE_TOKENS} tokens"),
    )
