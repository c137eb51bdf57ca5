"""Owns what a model computes, derived from its rule table and states: matrices, attention, sums.

Knows no hardware and no seconds; counts multiply-adds twice (FLOP) and bytes as they are held.

Matrices of one module that read the same input count as one kernel, as engines fuse them. Sources
of the counts: the shapes of the rule table; for attention the formulas of `StateWork`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from math import prod

from firstlight.models.spec import ModelSpec, with_attention
from firstlight.planning.weights import WeightClass, WeightTable, weight_table
from firstlight.planning.workload import PlanRules
from firstlight.sharding.attention_pattern import FULL, AttentionPattern
from firstlight.sharding.rules import REPLICATED, Facts, TensorRule
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    StateSpec,
)

# Kernels beside the matrices: norms and additions of a layer; what a kind of attention needs for
# convolution, gates, cache writes and the attention itself; choosing, sorting and joining experts.
LAYER_KERNELS = 4
STATE_KERNELS: Mapping[str, int] = {"grouped_query": 4, "latent": 6, "recurrent": 5}
EXPERT_KERNELS = 5


@dataclass(frozen=True)
class Matmul:
    """Matrices that read one input of one module. `classes` are places in the weight table.

    `values` are weights of one copy, uncut. `narrow`: kept in fewer bits than the compute type.
    """

    module: str
    classes: tuple[int, ...]
    values: int
    is_expert: bool
    narrow: bool


@dataclass(frozen=True)
class Sum:
    """A sum over tensor parallel ranks of `width` values a token."""

    module: str
    width: int


@dataclass(frozen=True)
class LayerKind:
    """Layers that compute alike: those in `layers`, ascending. Their attention reads what `pattern`
    says; `absorbs`: latents are read as they are in prompts too, never made keys and values of.
    """

    layers: tuple[int, ...]
    state: StateSpec
    matmuls: tuple[Matmul, ...]
    sums: tuple[Sum, ...]
    pattern: AttentionPattern = FULL
    absorbs: bool = False

    def count(self, layers: range) -> int:
        """How many of the layers given are of this kind."""
        return bisect_left(self.layers, layers.stop) - bisect_left(self.layers, layers.start)

    @property
    def has_experts(self) -> bool:
        """Whether tokens choose experts here."""
        return any(m.is_expert for m in self.matmuls)

    @property
    def extra_kernels(self) -> int:
        """Kernels beside the matrices."""
        return (
            LAYER_KERNELS
            + STATE_KERNELS.get(self.state.kind, 4)
            + (EXPERT_KERNELS if self.has_experts else 0)
        )


@dataclass(frozen=True)
class VisionWork:
    """An image encoder: weights used for each patch, for each feature, and its attention width."""

    patch_values: int
    feature_values: int
    attention_width: int
    blocks: int
    hidden: int
    patches_per_feature: int
    weight_bytes: int


@dataclass(frozen=True)
class ModelWork:
    """A model as work. `chosen` experts of `experts` see each token; `bank_rows` vectors beside the
    residual stream travel between layers."""

    spec: ModelSpec
    table: WeightTable
    kinds: tuple[LayerKind, ...]
    head: tuple[Matmul, ...]
    vision: VisionWork | None
    chosen: int
    bank_rows: int

    @property
    def facts(self) -> Facts:
        """Dims and axes."""
        return self.spec.facts

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.facts.dims["hidden"]

    @property
    def carry(self) -> int:
        """Values of a token that travel between layers: the residual stream and the bank."""
        return self.hidden * (1 + self.bank_rows)

    @property
    def vocab(self) -> int:
        """Rows of the head."""
        return self.facts.dims["vocab"]

    @cached_property
    def flops_per_token(self) -> int:
        """FLOP of all matrices for one token, head included; attention over the past is not."""
        layers = sum(
            len(kind.layers) * m.values * (self.chosen if m.is_expert else 1)
            for kind in self.kinds
            for m in kind.matmuls
        )
        return 2 * (layers + sum(m.values for m in self.head))

    def __hash__(self) -> int:
        return id(self)


def model_work(spec: ModelSpec, dtype: str, *, has_tiers: bool = False) -> ModelWork:
    """Returns the work of a model computed in `dtype`. With tiers pages may lie anywhere, and
    latent attention takes one form wherever they do.
    """
    table = weight_table(spec, dtype)
    config = spec.config
    moe = getattr(config, "moe", None)
    block = getattr(config, "residual_block", None)
    head = [i for i, c in enumerate(table.classes) if c.part == "head" and _values(c.tensor)]
    if not head:  # tied: the embedding is the head
        head = [i for i, c in enumerate(table.classes) if c.part == "embed"]
    return ModelWork(
        spec=spec,
        table=table,
        kinds=_kinds(spec, table, has_tiers),
        head=_matmuls(table, head),
        vision=_vision(spec, table),
        chosen=moe.top_k if moe is not None and spec.facts.num_experts else 0,
        bank_rows=-(-spec.facts.num_layers // block) if block else 0,
    )


def planned_work(spec: ModelSpec, rules: PlanRules) -> ModelWork:
    """Returns the work of a model as the rules have it computed, the reading of the past included.

    Raises UsageError for attention that does not fit the model or the blocks of its cache.
    """
    patterned = with_attention(spec, rules.attention, rules.block_size)
    return model_work(patterned, rules.dtype, has_tiers=bool(rules.tiers))


def _kinds(spec: ModelSpec, table: WeightTable, has_tiers: bool) -> tuple[LayerKind, ...]:
    by_layer: dict[int, list[int]] = {n: [] for n in range(spec.facts.num_layers)}
    for index, one in enumerate(table.classes):
        if not one.tensor.unused:
            for layer in one.layers:
                by_layer[layer].append(index)
    alike: dict[tuple[StateSpec, AttentionPattern, tuple[int, ...]], list[int]] = {}
    patterns = spec.patterns or (FULL,) * spec.facts.num_layers
    for layer, indices in by_layer.items():
        kind = (spec.states[layer], patterns[layer], tuple(indices))
        alike.setdefault(kind, []).append(layer)
    return tuple(
        LayerKind(
            layers=tuple(layers),
            state=state,
            matmuls=_matmuls(table, [i for i in indices if _is_matrix(table.classes[i])]),
            sums=_sums(spec, [table.classes[i] for i in indices]),
            pattern=pattern,
            absorbs=isinstance(state, LatentState) and (has_tiers or not pattern.is_full),
        )
        for (state, pattern, indices), layers in alike.items()
    )


def _is_matrix(one: WeightClass) -> bool:
    return bool(_values(one.tensor)) or one.tensor.name.endswith("_scale")


def _values(tensor: TensorRule) -> int:
    """Weights of a matrix as multiplied: 4-bit codes hold two a byte, scales are no weights."""
    if len(tensor.shape) != 2 or min(tensor.shape) < 2 or tensor.name.endswith("_scale"):
        return 0
    return prod(tensor.shape) * (2 if tensor.name.endswith("_packed") else 1)


def _matmuls(table: WeightTable, indices: list[int]) -> tuple[Matmul, ...]:
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for index in indices:
        tensor = table.classes[index].tensor
        groups.setdefault(_reads(tensor), []).append(index)
    return tuple(
        Matmul(
            module=module,
            classes=tuple(members),
            values=sum(_values(table.classes[i].tensor) for i in members),
            is_expert=table.classes[members[0]].is_expert,
            narrow=any(table.classes[i].tensor.dtype == "U8" for i in members),
        )
        for (module, _, _), members in groups.items()
    )


def _reads(tensor: TensorRule) -> tuple[str, int, bool]:
    """Module, width and side of the input a matrix reads; codes and scales go together."""
    stem, _, last = tensor.name.rpartition(".")
    module = ".".join(stem.split(".")[2:-1]) if last == "weight" else ".".join(stem.split(".")[2:])
    gathers = tensor.dim == 1 and tensor.axis != REPLICATED
    if tensor.dtype == "U8":
        return module, -1, gathers
    return module, tensor.shape[-1], gathers


def _sums(spec: ModelSpec, members: list[WeightClass]) -> tuple[Sum, ...]:
    found: dict[str, int] = {}
    for pattern in spec.family.table.sums:
        for one in members:
            tensor = one.tensor
            if (
                tensor.dim == 1
                and tensor.axis != REPLICATED
                and fnmatch(tensor.name, pattern + ".*")
            ):
                found[pattern.split(".", 2)[2]] = tensor.shape[0]
    return tuple(Sum(module, width) for module, width in found.items())


def _vision(spec: ModelSpec, table: WeightTable) -> VisionWork | None:
    vision = getattr(spec.config, "vision", None)
    if vision is None:
        return None
    parts = {"vision": 0, "projector": 0}
    for one in table.classes:
        if one.part not in parts or one.tensor.name.endswith("positions"):
            continue
        shape = one.tensor.shape
        if len(shape) > 1:
            parts[one.part] += prod(shape) * one.copies
    held = (c for c in table.classes if c.part in parts)
    return VisionWork(
        patch_values=parts["vision"],
        feature_values=parts["projector"],
        attention_width=vision.attention_width,
        blocks=vision.blocks,
        hidden=vision.hidden_size,
        patches_per_feature=vision.merge[0] * vision.merge[1],
        weight_bytes=sum(table.whole_bytes(c) * c.copies for c in held),
    )


@dataclass(frozen=True)
class StateWork:
    """What attention over a state costs one rank of a TP group.

    `token_flops` for each pair of a new token and a past one in a decode step, `pair_flops` the
    same in a prompt's chunk, `step_flops` for each new token whatever the past, `expand_flops` for
    each past token that a prompt's chunk makes keys and values of again, `choose_flops` for each
    pair of a new token and a summary that it chooses by.
    """

    token_flops: float = 0.0
    pair_flops: float = 0.0
    step_flops: float = 0.0
    expand_flops: float = 0.0
    choose_flops: float = 0.0


def state_work(state: StateSpec, facts: Facts, tp: int) -> StateWork:
    """Returns the FLOP of attention over one layer's state.

    Grouped query: scores and weighted values, 4 x heads x head width, as much for a summary,
    which is two keys. Latent: absorbed in decode,
    2 x heads x (cached width + latent); expanded in prompts, 2 x heads x (key + value width), and
    2 x latent x expanded width for every past token of a chunk.
    Recurrent: decay, read, write, read of a key x value matrix, 7 FLOP an entry.
    """
    dims = facts.dims
    if isinstance(state, GroupedQueryState):
        each = 4.0 * dims["q_rows"] / tp
        return StateWork(each, each, choose_flops=each)
    if isinstance(state, LatentState):
        heads = facts.axes["heads"].pieces
        absorbed = 2.0 * heads / tp * (state.width + dims["kv_rank"])
        expanded = 2.0 * (dims["q_rows"] + dims["value_rows"]) / tp
        again = 2.0 * dims["kv_rank"] * dims["kv_rows"] / tp
        chosen = 4.0 * heads / tp * state.width
        return StateWork(absorbed, expanded, expand_flops=again, choose_flops=chosen)
    if isinstance(state, RecurrentState):
        return StateWork(step_flops=7.0 * state.heads / tp * state.key_dim * state.value_dim)
    return StateWork()
