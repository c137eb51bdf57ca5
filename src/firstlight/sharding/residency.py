"""Owns which weights of a rank stay in memory when not all of them may, as integers from the rules.

Knows neither tensors nor files, and not how what does not stay comes back.

A rank's weights are: what is outside the layers, each layer without its routed experts, and the
routed experts, all of one size. The first stays. Layers that do not all fit take turns in buffers;
experts that do not all fit share slots, whatever their layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from firstlight.errors import OutOfBudget
from firstlight.sharding.codecs import dtype_bytes
from firstlight.sharding.layout import Layout
from firstlight.sharding.rules import Facts, RuleTable, TensorRule, expand
from firstlight.sharding.slices import local_shape, slice_for
from firstlight.units import format_bytes

ALIGNMENT = 64
# One layer computes while the next one arrives.
BUFFERS = 2
# One expert computes while the next one arrives.
LEAST_SLOTS = 2


class Held(NamedTuple):
    """One tensor as a rank holds it: `dtype` is a header type, empty for the compute dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class RankWeights:
    """Bytes of one rank: `outside` the layers, of each layer without its routed experts (`layers`,
    and `images` where they lie in one buffer), and of one expert; `experts` counts those at hand by
    layer."""

    outside: int
    layers: tuple[int, ...]
    images: tuple[int, ...]
    experts: tuple[int, ...]
    expert_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of everything."""
        return self.outside + sum(self.layers) + sum(self.experts) * self.expert_bytes


@dataclass(frozen=True)
class ResidencyPlan:
    """What stays: all but the layers `streamed`, which share `num_buffers` of `buffer_bytes`, and,
    where `num_slots` is not 0, but for the experts, which share so many slots."""

    num_bytes: int
    whole_bytes: int
    streamed: tuple[int, ...] = ()
    num_buffers: int = 0
    buffer_bytes: int = 0
    num_slots: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether everything stays."""
        return not self.streamed and not self.num_slots


def image_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where tensors of so many bytes stand in one buffer, and the bytes of the buffer."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


def rank_weights(table: RuleTable, facts: Facts, layout: Layout, element_bytes: int) -> RankWeights:
    """Returns what each rank of a layout without pipeline stages holds.

    One expert stands for all of them. Raises LayoutError for a layout that cannot be.
    """
    outside = 0
    sizes: list[list[int]] = [[] for _ in range(facts.num_layers)]
    expert_sizes: dict[int, int] = {}
    for rule, size in _sizes(table, facts, layout, element_bytes):
        if rule.layer is None:
            outside += size
        elif rule.expert is None:
            sizes[rule.layer].append(size)
        else:
            expert_sizes[rule.layer] = expert_sizes.get(rule.layer, 0) + size
    assert len(set(expert_sizes.values())) <= 1, "experts of several sizes share no slots"
    here = facts.num_experts // layout.ep
    return RankWeights(
        outside,
        tuple(sum(own) for own in sizes),
        tuple(image_offsets(own)[1] for own in sizes),
        tuple(here if layer in expert_sizes else 0 for layer in range(facts.num_layers)),
        next(iter(expert_sizes.values()), 0),
    )


def _sizes(
    table: RuleTable, facts: Facts, layout: Layout, element_bytes: int
) -> Iterator[tuple[TensorRule, int]]:
    place = layout.place(0)  # every rank holds as much
    for rule in expand(table, replace(facts, num_experts=min(1, facts.num_experts))):
        part = slice_for(rule, facts, place)
        if part is not None:
            width = dtype_bytes(rule.dtype) if rule.dtype else element_bytes
            yield rule, width * prod(local_shape(rule, part))


def plan_residency(weights: RankWeights, budget: int) -> ResidencyPlan:
    """Returns what stays within a budget: as many whole layers as possible, then as many experts.

    Raises OutOfBudget with the smallest budget that works.
    """
    if weights.num_bytes <= budget:
        return ResidencyPlan(weights.num_bytes, weights.num_bytes)
    fitting = [plan for plan in _choices(weights) if plan.num_bytes <= budget]
    if not fitting:
        raise OutOfBudget(_refusal(weights, budget))
    best = min(fitting, key=lambda p: sum(weights.layers[layer] for layer in p.streamed))
    more = (budget - best.num_bytes) // weights.expert_bytes if best.num_slots else 0
    more = min(more, sum(weights.experts) - best.num_slots)
    return replace(
        best,
        num_bytes=best.num_bytes + more * weights.expert_bytes,
        num_slots=best.num_slots + more,
    )


def least_budget(weights: RankWeights) -> int:
    """Returns the smallest budget that `plan_residency` accepts."""
    return min([weights.num_bytes, *(plan.num_bytes for plan in _choices(weights))])


def _choices(weights: RankWeights) -> Iterator[ResidencyPlan]:
    """Yields every plan looked at, with the fewest expert slots; none for weights without experts
    whose layers are too few to take turns.

    Large layers may stay so that buffers are small; those that do not are spread evenly, so that
    what stays computes while the next one arrives.
    """
    slots = min(LEAST_SLOTS, sum(weights.experts))
    fixed = weights.outside + slots * weights.expert_bytes
    if slots:
        yield ResidencyPlan(fixed + sum(weights.layers), weights.num_bytes, num_slots=slots)
    for largest in sorted(set(weights.images)):
        small = [layer for layer, size in enumerate(weights.images) if size <= largest]
        for count in range(BUFFERS + 1, len(small) + 1):
            streamed = tuple(small[(2 * i + 1) * len(small) // (2 * count)] for i in range(count))
            held = sum(weights.layers) - sum(weights.layers[layer] for layer in streamed)
            size = max(weights.images[layer] for layer in streamed)
            yield ResidencyPlan(
                fixed + held + BUFFERS * size,
                weights.num_bytes,
                streamed,
                BUFFERS,
                size,
                slots,
            )


def _refusal(weights: RankWeights, budget: int) -> str:
    least = least_budget(weights)
    parts = [f"{format_bytes(weights.outside)} outside the layers"]
    if len(weights.layers) > BUFFERS:
        parts.append(f"{BUFFERS} buffers of up to {format_bytes(max(weights.images))} for layers")
    if weights.expert_bytes:
        parts.append(f"{LEAST_SLOTS} experts of {format_bytes(weights.expert_bytes)}")
    return (
        f"a weights budget of {format_bytes(budget)} on each rank is too small: at least "
        f"{least} bytes ({format_bytes(least)}) are needed ({', '.join(parts)}); all weights take "
        f"{format_bytes(weights.num_bytes)}. Raise --weights-budget to that, or use more ranks"
    )
