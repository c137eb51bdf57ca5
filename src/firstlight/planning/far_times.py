"""Owns what it costs in time that state lies outside the device: the next token of a long sequence,
and a prompt that is found there instead of computed anew.

Knows no cache: which bytes move follows from `cache_places` and the states of the layers. Seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from firstlight.cache.cache_group import RECURRENT
from firstlight.cache.far_pool import DISK, HOST, FarSizes
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.cache.paged_group import most_blocks_held, sink_blocks, window_of
from firstlight.planning.constants import (
    EXPECTED,
    FAR_LAYER_SECONDS,
    FAR_RATE,
    FAR_UNIT_SECONDS,
)
from firstlight.planning.cost import CostModel
from firstlight.planning.hardware import Fleet
from firstlight.planning.memory import MemoryPlan, RankMemory
from firstlight.planning.predict import decode_step, prefill_seconds
from firstlight.planning.rates import rates_of
from firstlight.planning.reading import tokens_fetched
from firstlight.planning.tier_sizing import UnitCut, unit_bytes_of
from firstlight.planning.work import ModelWork
from firstlight.planning.workload import PlanRules, Workload
from firstlight.sharding.layout import stage_layers
from firstlight.sharding.state_spec import StateSpec


@dataclass(frozen=True)
class WarmHit:
    """The first token of a prompt of which `tokens` are found at a place; `num_bytes` come to the
    device of the rank that waits longest.
    """

    tokens: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class FarTimes:
    """Times of one sequence alone. At its full length `beyond` pages lie outside the device; of
    them a rank reads `read_bytes` at most for the next token, all ranks together in `reading`
    seconds, and `token` is the time of that token. `warm` are hits on the prompt that times are
    predicted for, by place; `anew` is its first token without one.
    """

    beyond: FarSizes
    read_bytes: int
    reading: float
    token: float
    warm: Mapping[str, WarmHit]
    anew: float


def far_times(
    work: ModelWork, memory: MemoryPlan, fleet: Fleet, workload: Workload, rules: PlanRules
) -> FarTimes:
    """Returns the times of a plan with tiers, each the expected one.

    What a token reads outside the device is fetched while the segment before it is computed. A hit
    computes its last tokens in one step; without one a prompt goes through all its chunks.
    """
    size = rules.cache_element_bytes or work.table.element_bytes
    rates = rates_of(fleet, EXPECTED, rules.dtype)
    model = CostModel(work, memory.arrangement, rates, size, rules.kv_dtype)
    cut = UnitCut(rules.block_size, memory.arrangement.layout.tp, size, rules.kv_dtype)
    mover = _Mover(work, memory, cut, _far_rates(memory, fleet, rules))
    read_bytes, reading = mover.read(workload.context)
    step, spent = decode_step(model, 1, workload.context)
    prompt = workload.input_tokens + workload.images * workload.image_tokens
    last, _ = decode_step(model, 1, prompt)
    hits = {place: mover.hit(place, prompt, last) for place in (HOST, DISK)}
    return FarTimes(
        beyond=memory.places.beyond(workload.context),
        read_bytes=read_bytes,
        reading=reading,
        token=step + max(0.0, reading - spent.attention),
        warm={place: hit for place, hit in hits.items() if hit is not None},
        anew=prefill_seconds(model, prompt, rules.chunk_tokens)[0] + rates.constants.host,
    )


def _far_rates(memory: MemoryPlan, fleet: Fleet, rules: PlanRules) -> Mapping[str, float]:
    """Bytes a second of one rank from each place: the way to it, or what the threads that bring
    units check and copy, whichever is less. Ranks of a machine share its storage.
    """
    sharing = min(fleet.machine, memory.arrangement.devices)
    ways = {HOST: fleet.device.host_bandwidth.expected, DISK: rules.storage_rate / sharing}
    return {place: min(FAR_RATE, way) for place, way in ways.items()}


@dataclass(frozen=True)
class _Mover:
    """What moves between the places of a plan. Stages read one after the other for a token, and
    fetch at the same time for a hit.
    """

    work: ModelWork
    memory: MemoryPlan
    cut: UnitCut
    rates: Mapping[str, float]

    def read(self, context: int) -> tuple[int, float]:
        """Returns what a token at the end of a sequence of full length reads outside the device:
        bytes of the rank that reads most, and seconds of all stages.
        """
        found = [self._read(stage, context) for stage in self.memory.stages]
        return max(size for size, _ in found), sum(seconds for _, seconds in found)

    def hit(self, place: str, prompt: int, last: float) -> WarmHit | None:
        """Returns the first token of a prompt that is found at a place, `last` seconds after it has
        come; None where the place is too small for it.
        """
        blocks = (prompt - 1) // self.cut.block_size
        if not 0 < blocks <= getattr(self.memory.places.far_pages, place):
            return None
        moved = [self._units(stage, blocks) for stage in self.memory.stages]
        waits = [number * FAR_UNIT_SECONDS + size / self.rates[place] for number, size in moved]
        largest = max(size for _, size in moved)
        return WarmHit(blocks * self.cut.block_size, largest, max(waits) + last)

    def _read(self, stage: RankMemory, context: int) -> tuple[int, float]:
        layout = self.memory.arrangement.layout
        layers = stage_layers(self.work.facts.num_layers, layout, stage.stage)
        beyond = stage.places.beyond(context)
        far = sum(beyond) * self.cut.block_size
        num_bytes, seconds = 0, 0.0
        for kind in self.work.kinds:
            tokens = tokens_fetched(kind.state, kind.pattern, context, far, tp=self.cut.tp)
            pages = kind.count(layers) * blocks_for(ceil(tokens), self.cut.block_size)
            size = pages * self.cut.unit_bytes(kind.state)
            num_bytes += size
            seconds += pages * FAR_LAYER_SECONDS
            seconds += sum(
                size * part / max(1, sum(beyond)) / self.rates[place]
                for place, part in beyond._asdict().items()
            )
        return num_bytes, seconds

    def _units(self, stage: RankMemory, blocks: int) -> tuple[int, int]:
        """Units of all groups of a rank, and their bytes, that hold so many blocks of a prompt."""
        layout = self.memory.arrangement.layout
        layers = stage_layers(self.work.facts.num_layers, layout, stage.stage)
        states = self.work.spec.states[layers.start : layers.stop]
        sizes = unit_bytes_of(states, self.cut)
        counts = [self._held(state, blocks) for state in distinct_specs(states)]
        return sum(counts), sum(n * size for n, size in zip(counts, sizes, strict=True))

    def _held(self, state: StateSpec, blocks: int) -> int:
        """Units of one group: a snapshot of recurrent state, the blocks that a window sees."""
        if state.kind == RECURRENT:
            return 1
        window = window_of(state)
        if window is None:
            return blocks
        seen = most_blocks_held(window, 1, self.cut.block_size)
        return min(blocks, seen + sink_blocks(state, self.cut.block_size))
