"""Owns the bytes of weights a rank holds under a layout, exact from the rule table.

Works rule by rule, never tensor by tensor: half a million tensors of a large model are some sixty
rules times layers times experts, so a layout is priced in microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from firstlight.errors import ConfigError
from firstlight.models.spec import ModelSpec
from firstlight.sharding.codecs import dtype_bytes
from firstlight.sharding.layout import Layout, stage_layers
from firstlight.sharding.residency import plan_residency, rank_weights
from firstlight.sharding.rules import Facts, Rule, RuleTable, TensorRule, expand
from firstlight.sharding.slices import holds_unit, local_shape, slice_for

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class WeightClass:
    """All tensors of one rule: equal in shape and cut, one in each of `layers` (empty: one in all),
    `copies` of each (experts, blocks of a tower).

    `part` says in a word what it belongs to.
    """

    part: str
    tensor: TensorRule
    layers: tuple[int, ...]
    copies: int

    @property
    def is_expert(self) -> bool:
        """Whether each copy is one expert's."""
        return self.tensor.expert is not None

    @property
    def num_tensors(self) -> int:
        """Tensors of the rule in the whole model."""
        return self.copies * max(1, len(self.layers))

    def count(self, layers: range) -> int:
        """How many of the layers given have this tensor."""
        return bisect_left(self.layers, layers.stop) - bisect_left(self.layers, layers.start)


@dataclass(frozen=True)
class WeightTable:
    """The weights of a model in one compute type; sizes in bytes."""

    facts: Facts
    classes: tuple[WeightClass, ...]
    element_bytes: int

    def width(self, tensor: TensorRule) -> int:
        """Bytes of one element as held."""
        return dtype_bytes(tensor.dtype) if tensor.dtype else self.element_bytes

    def whole_bytes(self, one: WeightClass) -> int:
        """Bytes of one copy in one layer, uncut."""
        return prod(one.tensor.shape) * self.width(one.tensor)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all parameters, each counted once; unused values of a source are not."""
        return sum(
            self.whole_bytes(one) * one.num_tensors for one in self.classes if not one.tensor.unused
        )

    def local_bytes(self, layout: Layout) -> tuple[int, ...]:
        """Bytes one rank holds of each class in one layer (in all, outside the layers).

        Every rank of a stage holds the same: cut axes are dealt evenly, a vocabulary is padded.
        """
        return _local_bytes(self, layout.tp, layout.dp, layout.ep)

    def stage_bytes(self, layout: Layout, stage: int) -> dict[str, int]:
        """Bytes a rank of a pipeline stage holds, by part."""
        sizes: Counter[str] = Counter()
        held = self.stage_counts(layout.pp, stage)
        for one, size, count in zip(self.classes, self.local_bytes(layout), held, strict=True):
            sizes[one.part] += size * count
        return {part: size for part, size in sizes.items() if size}

    def stage_counts(self, pp: int, stage: int) -> tuple[int, ...]:
        """How many times a stage of `pp` holds each class: once a layer, 0 or 1 outside them."""
        return _stage_counts(self, pp, stage)

    def __hash__(self) -> int:
        return id(self)


@lru_cache(maxsize=4096)
def _stage_counts(table: WeightTable, pp: int, stage: int) -> tuple[int, ...]:
    layout = Layout(pp=pp)
    layers, place = stage_layers(table.facts.num_layers, layout, stage), layout.place(stage)
    return tuple(
        one.count(layers) if one.layers else int(holds_unit(one.tensor, table.facts, place))
        for one in table.classes
    )


@lru_cache(maxsize=4096)
def _local_bytes(table: WeightTable, tp: int, dp: int, ep: int) -> tuple[int, ...]:
    place = Layout(tp=tp, dp=dp, ep=ep).place(0)
    sizes = []
    for one in table.classes:
        part = slice_for(one.tensor, table.facts, place)
        copies = one.copies // ep if one.is_expert else one.copies
        held = 0 if part is None else prod(local_shape(one.tensor, part))
        sizes.append(held * copies * table.width(one.tensor))
    return tuple(sizes)


def weight_table(spec: ModelSpec, dtype: str) -> WeightTable:
    """Returns the weights of a model computed in `dtype` (float32, bfloat16, float16)."""
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"unknown compute type {dtype!r}; known: {', '.join(ELEMENT_BYTES)}")
    facts = spec.facts
    # One expert and one block stand for all of them.
    single = replace(facts, num_experts=min(1, facts.num_experts), num_blocks=1)
    classes = (_weight_class(rule, spec.family.table, single, facts) for rule in _rules(spec))
    return WeightTable(facts, tuple(c for c in classes if c), ELEMENT_BYTES[dtype])


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return spec.family.table.rules


def _weight_class(rule: Rule, table: RuleTable, single: Facts, facts: Facts) -> WeightClass | None:
    tensors = list(expand(replace(table, rules=(rule,)), single))
    if not tensors:
        return None
    copies = facts.num_experts if "{expert}" in rule.source else 1
    if "{block}" in rule.source:
        copies *= facts.num_blocks
    if not copies:
        return None
    layers = tuple(t.layer for t in tensors if t.layer is not None)
    return WeightClass(part_of(tensors[0].name), tensors[0], layers, copies)


def held_bytes(
    spec: ModelSpec, table: WeightTable, layout: Layout, stage: int, budget: int | None
) -> dict[str, int]:
    """Returns the bytes a rank of a stage has for weights, by part: all of them, or what a budget
    leaves, as a start allocates it.

    Raises OutOfBudget for a budget that is too small, ConfigError for one with pipeline stages.
    """
    if budget is None:
        return table.stage_bytes(layout, stage)
    if layout.pp > 1:
        raise ConfigError("a weights budget is for ranks without pipeline stages")
    weights = rank_weights(spec.family.table, spec.facts, layout, table.element_bytes)
    plan = plan_residency(weights, budget)
    if plan.is_whole:
        return table.stage_bytes(layout, stage)
    moving = {
        "layer buffers": plan.num_buffers * plan.buffer_bytes,
        "expert slots": plan.num_slots * weights.expert_bytes,
    }
    return {"resident": plan.num_bytes - sum(moving.values()), **moving}


def part_of(name: str) -> str:
    """Names the part of a model a parameter belongs to, for people: attention, experts, head ..."""
    words = name.split(".")
    if words[0] != "layers":
        return words[0]
    if ".experts." in name:
        return "experts"
    if words[2] == "moe":
        return "shared experts" if words[3] == "shared" else "expert routing"
    known: Mapping[str, str] = {"attention": "attention", "mlp": "dense mlp"}
    return known.get(words[2], "norms and mixes")
