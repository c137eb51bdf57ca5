"""Owns what each rank's memory will hold, component by component, and whether it fits.

Components carry the names the engine measures under (`weights/0`, `kv/0`), so that a plan can be
compared with what was allocated. Weights follow from the rule table and caches from the allocator's
own rounding, exactly; the other components from the formulae below, which an audit may calibrate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from firstlight.cache.cache_group import RECURRENT
from firstlight.planning.activations import (
    StepShape,
    activation_bytes,
    encoder_bytes,
    step_bytes,
)
from firstlight.planning.arrangement import Arrangement
from firstlight.planning.cache_places import CachePlaces, plan_places
from firstlight.planning.caches import CacheNeed, cache_bytes, sequence_bytes
from firstlight.planning.hardware import HOST_VENDOR, Fleet
from firstlight.planning.weights import held_bytes
from firstlight.planning.work import ModelWork
from firstlight.planning.workload import PlanRules, Workload
from firstlight.settings.tiers import parse_tiers
from firstlight.sharding.layout import Layout, stage_layers
from firstlight.sharding.state_spec import EncoderState

WEIGHTS, CACHES = "weights", "kv"
ACTIVATIONS, ENCODER, COLLECTIVES = "activations", "encoder", "collectives"
TIERS, RESERVE = "tiers", "reserve"
COMPONENTS = (WEIGHTS, CACHES, TIERS, ACTIVATIONS, ENCODER, COLLECTIVES, RESERVE)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of every rank of one pipeline stage; they are equal. `parts` splits components,
    `places` says where its caches lie, `sequence` what of them one sequence of full length takes,
    by kind of state.
    """

    stage: int
    ranks: range
    components: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]
    device_bytes: int
    places: CachePlaces
    sequence: Mapping[str, int]

    @property
    def used(self) -> int:
        """Bytes of all components, the reserve included."""
        return sum(self.components.values())

    @property
    def spare(self) -> int:
        """Bytes left; negative when it does not fit."""
        return self.device_bytes - self.used


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of all ranks of one replica. `sequences` run at once in each data-parallel
    part."""

    arrangement: Arrangement
    sequences: int
    stages: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        """The stage with least left."""
        return min(self.stages, key=lambda stage: stage.spare)

    @property
    def fullest(self) -> RankMemory:
        """The stage whose devices hold the fewest tokens."""
        paged = [stage for stage in self.stages if set(stage.sequence) - {RECURRENT}]
        return min(paged, key=lambda stage: stage.places.device_blocks)

    @property
    def places(self) -> CachePlaces:
        """Where caches lie on the ranks of that stage."""
        return self.fullest.places

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.worst.spare >= 0

    def stage_of(self, rank: int) -> RankMemory:
        """The memory of a rank."""
        return next(stage for stage in self.stages if rank in stage.ranks)

    def predicted_bytes(self, component: str) -> int:
        """Bytes planned for a component of a rank as the engine names it: `weights/3`.

        Raises KeyError for a name that no plan has.
        """
        name, _, rank = component.partition("/")
        return self.stage_of(int(rank)).components[name]


def plan_memory(
    work: ModelWork, arrangement: Arrangement, fleet: Fleet, workload: Workload, rules: PlanRules
) -> MemoryPlan:
    """Returns the memory of every rank under an arrangement."""
    layout = arrangement.layout
    sequences = arrangement.sequences_each(workload.concurrency)
    shared = _step_bytes(work, layout, workload, rules, sequences)
    device = int(fleet.device.memory.expected)
    group = layout.dp * layout.tp
    stages = []
    for stage in range(layout.pp):
        weights = held_bytes(work.spec, work.table, layout, stage, rules.weights_budget_bytes)
        layers = stage_layers(work.facts.num_layers, layout, stage)
        need = CacheNeed(
            states=work.spec.states[layers.start : layers.stop],
            tp=layout.tp,
            element_bytes=rules.cache_element_bytes or work.table.element_bytes,
            block_size=rules.block_size,
            sequences=sequences,
            context=workload.context,
            context_parallel=arrangement.context_parallel,
            chunk_tokens=rules.chunk_tokens,
            kv_dtype=rules.kv_dtype,
        )
        others = {
            WEIGHTS: sum(weights.values()),
            **_only_where_used(shared, layout, stage),
            RESERVE: int(device * rules.reserve_share),
        }
        places = plan_places(
            need, parse_tiers(rules.tiers), available=device - sum(others.values())
        )
        caches = cache_bytes(need, places.device_blocks)
        components = {**others, CACHES: sum(caches.values()), TIERS: places.tiers_bytes}
        if fleet.device.vendor == HOST_VENDOR:  # the host tier lies in the same memory
            components[TIERS] += places.host_bytes
        stages.append(
            RankMemory(
                stage=stage,
                ranks=range(stage * group, (stage + 1) * group),
                components={name: components[name] for name in COMPONENTS},
                parts={WEIGHTS: weights, CACHES: caches},
                device_bytes=device,
                places=places,
                sequence=sequence_bytes(need),
            )
        )
    return MemoryPlan(arrangement, sequences, tuple(stages))


def _only_where_used(shared: Mapping[str, int], layout: Layout, stage: int) -> dict[str, int]:
    """The encoder runs in the first stage, logits are made in the last."""
    last = stage == layout.pp - 1
    return {
        ACTIVATIONS: shared["with logits"] if last else shared[ACTIVATIONS],
        ENCODER: shared[ENCODER] if stage == 0 else 0,
        COLLECTIVES: shared[COLLECTIVES],
    }


def _step_bytes(
    work: ModelWork, layout: Layout, workload: Workload, rules: PlanRules, sequences: int
) -> dict[str, int]:
    """Bytes that one step needs beside weights and caches; T tokens, s bytes a value.

    Logits: sequences x vocabulary. Encoder: what is kept for features of images, or all of one
    request where they are more, and the largest image. Collectives: the largest message twice,
    T x s x hidden, with the carry of a pipeline cut and what tokens send to their experts.
    """
    size, tokens = work.table.element_bytes, rules.max_batch_tokens
    span = min(rules.chunk_tokens, workload.context)
    message = work.hidden * (layout.tp > 1 or layout.dp > 1) + work.carry * (layout.pp > 1)
    if layout.dp > 1:
        message += work.chosen * work.facts.dims.get("latent", work.hidden)
    shape = StepShape(tokens, span, workload.context, sequences)
    return {
        ACTIVATIONS: activation_bytes(work, layout, shape),
        "with logits": step_bytes(work, layout, shape),
        ENCODER: _encoder_bytes(work, workload, rules),
        COLLECTIVES: 2 * tokens * size * message,
    }


def _encoder_bytes(work: ModelWork, workload: Workload, rules: PlanRules) -> int:
    vision = work.vision
    if vision is None:
        return 0
    features = feature_bytes(work, [workload.image_tokens] * workload.images)
    kept = max(rules.encoder_cache_bytes, features)
    if not workload.images:
        return kept
    return kept + encoder_bytes(work, workload.image_tokens * vision.patches_per_feature)


def feature_bytes(work: ModelWork, tokens: Sequence[int]) -> int:
    """Returns the bytes of the features of images of so many tokens, as the encoder's cache keeps
    them."""
    return sum(tokens) * EncoderState(work.hidden).token_bytes(1, work.table.element_bytes)
