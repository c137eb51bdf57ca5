"""Owns what a rule table can say and how it expands to concrete tensors; knows no model and no
file.

A family's `weights.py` is one RuleTable: for each source tensor our name, its shape in words of the
config, the axis along which it is cut and the dim that axis lies on. Inspect, plan, converter,
loader, runtime sums, verification and training read this and nothing else.

Patterns. A source or name may hold {layer}, {expert} and {block} (of a vision tower); a source may
begin with {prefix}, which a family sets where checkpoints differ in it. Rules of all experts with
one name fill one parameter, stacked along a new first dim.

Axis kinds. `replicated`: every rank holds all. `once`: rank 0 of a sum holds the values, the others
zeros (a bias added after a partial sum). Any other name is an Axis of the model's Facts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

import msgspec

from firstlight.errors import ConfigError

REPLICATED = "replicated"
ONCE = "once"
EXPERT = "expert"
VOCABULARY_GRANULE = 64


@dataclass(frozen=True)
class Axis:
    """A direction a model may be cut along, as `pieces` indivisible pieces (heads, columns of
    width).

    `replicable`: more ranks than pieces may share one (few KV heads). `ragged`: pieces are dealt in
    equal runs and the last ranks may hold fewer or none (vocabulary; a piece is 64 rows). `piece`
    says in words what may not be cut; it is shown when a layout would.
    """

    name: str
    pieces: int
    replicable: bool = False
    ragged: bool = False
    piece: str = ""


@dataclass(frozen=True)
class Rule:
    """One line of a table: where a tensor comes from, its name, shape and cut.

    `when` names flags or layer sets of Facts, all of which must hold (empty: always). `fused` names
    the dims stacked along dim 0 of one source tensor, of which this rule takes number `piece`.
    `optional` tensors may be missing from a checkpoint. `dtype` is a header type the tensor keeps
    in memory (F32, U8), empty for the compute dtype. `unused` values belong to the source and to no
    parameter: a store keeps them, no rank reads them. `values` counts the parameters an element
    holds: 2 in a byte of packed 4-bit values, 0 in a scale.
    """

    source: str
    name: str
    shape: tuple[str | int, ...]
    axis: str = REPLICATED
    dim: int = 0
    when: str = ""
    fused: tuple[str, ...] = ()
    piece: int = 0
    optional: bool = False
    dtype: str = ""
    unused: bool = False
    values: int = 1


@dataclass(frozen=True)
class Ignored:
    """Source names a checkpoint may carry and the model does not use; `reason` is shown to
    people.
    """

    pattern: str
    reason: str
    when: str = ""


@dataclass(frozen=True)
class PartName:
    """What people call the parameters whose names match `pattern`, in layers where `when` holds."""

    pattern: str
    part: str
    when: str = ""


@dataclass(frozen=True)
class RuleTable:
    """All rules of a family. `sums` names the modules whose output is summed over tensor parallel
    ranks; `tied` maps a parameter name to the one it shares when the flag `tied` is set; `parts`
    groups parameters for people, the first pattern that matches names the part."""

    family: str
    version: int
    rules: tuple[Rule, ...]
    sums: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    ignored: tuple[Ignored, ...] = ()
    parts: tuple[PartName, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a config says, in the words the rule table uses.

    `num_blocks` counts the blocks of a vision tower; `source_prefix` begins source names.
    """

    num_layers: int
    dims: Mapping[str, int]
    axes: Mapping[str, Axis]
    layer_sets: Mapping[str, frozenset[int]] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    num_experts: int = 0
    num_blocks: int = 0
    source_prefix: str = ""


class TensorRule(msgspec.Struct, frozen=True, gc=False):
    """One concrete tensor of a model: where it comes from, what it is called and how it is cut.

    `source_rows` is the run of rows of a fused source tensor, None when the tensor is taken whole;
    `dtype` the header type it keeps in memory, empty for the compute dtype; `unused` as in Rule.
    `stacked`: one expert of a parameter that has the local experts along a new first dim;
    `values` is the number of parameters in one element.
    """

    source: str
    name: str
    unit: str
    shape: tuple[int, ...]
    axis: str
    dim: int
    layer: int | None = None
    expert: int | None = None
    source_rows: tuple[int, int] | None = None
    optional: bool = False
    dtype: str = ""
    unused: bool = False
    stacked: bool = False
    values: int = 1


def width_axis(name: str, width: int, largest_piece: int = 32) -> Axis:
    """Returns the axis of a feed-forward width, in pieces of the largest divisor up to 32
    columns.
    """
    piece = max(d for d in range(1, largest_piece + 1) if width % d == 0)
    return Axis(name, width // piece, piece=f"run of {piece} columns")


def vocabulary_axis(num_rows: int) -> Axis:
    """Returns the axis of a vocabulary, in pieces of 64 rows of which the last may be short."""
    return Axis("vocabulary", -(-num_rows // VOCABULARY_GRANULE), ragged=True)


def expand(table: RuleTable, facts: Facts) -> Iterator[TensorRule]:
    """Yields every tensor the model has, units in load order.

    Raises ConfigError when a rule uses a dim, axis or set that Facts does not define.
    """
    before = [r for r in table.rules if "{layer}" not in r.name and unit_of(r.name) == "embed"]
    layered = [r for r in table.rules if "{layer}" in r.name]
    after = [r for r in table.rules if "{layer}" not in r.name and unit_of(r.name) != "embed"]
    for rule in before:
        yield from _expand_rule(rule, facts, None)
    for layer in range(facts.num_layers):
        for rule in layered:
            yield from _expand_rule(rule, facts, layer)
    for rule in after:
        yield from _expand_rule(rule, facts, None)


def unit_of(name: str) -> str:
    """Returns the store unit a parameter belongs to: its first path component, or its layer."""
    first, _, rest = name.partition(".")
    if first != "layers" or rest.startswith("{"):
        return first
    return f"layer-{int(rest.split('.', 1)[0]):03d}"


def applies(when: str, facts: Facts, layer: int | None) -> bool:
    """Says whether all words of `when` hold for a layer (None: outside the layers)."""
    return all(
        layer in facts.layer_sets[word] if word in facts.layer_sets else word in facts.flags
        for word in when.split()
    )


def _expand_rule(rule: Rule, facts: Facts, layer: int | None) -> Iterator[TensorRule]:
    if not applies(rule.when, facts, layer):
        return
    shape = tuple(_dim(d, rule, facts) for d in rule.shape)
    if rule.axis not in (REPLICATED, ONCE) and rule.axis not in facts.axes:
        raise ConfigError(f"rule {rule.name} is cut along {rule.axis!r}, which the model lacks")
    rows = _fused_rows(rule, facts)
    # Half a million experts share a few hundred names and patterns.
    marks = {"prefix": facts.source_prefix, "layer": layer, "expert": "{expert}"}
    source = rule.source.format_map({**marks, "block": "{block}"})
    pattern = rule.name.format_map({**marks, "block": "{block}"})
    own_names = "{expert}" in pattern or "{block}" in pattern
    name, unit = pattern, unit_of(pattern)
    for expert, block in product(*_counted(rule, facts)):
        if own_names:
            name = pattern.replace("{expert}", str(expert)).replace("{block}", str(block))
            unit = unit_of(name)
        own_source = source if expert is None else source.replace("{expert}", str(expert))
        yield TensorRule(
            source=own_source if block is None else own_source.replace("{block}", str(block)),
            name=name,
            unit=unit,
            shape=shape,
            axis=rule.axis,
            dim=rule.dim,
            layer=layer,
            expert=expert,
            source_rows=rows,
            optional=rule.optional,
            dtype=rule.dtype,
            unused=rule.unused,
            stacked=expert is not None and "{expert}" not in pattern,
            values=rule.values,
        )


def _counted(rule: Rule, facts: Facts) -> tuple[Iterable[int | None], Iterable[int | None]]:
    """Returns the experts and the blocks a rule stands for, (None,) where it names none."""
    experts = range(facts.num_experts) if "{expert}" in rule.source else (None,)
    blocks = range(facts.num_blocks) if "{block}" in rule.source else (None,)
    return experts, blocks


def _dim(value: str | int, rule: Rule, facts: Facts) -> int:
    if isinstance(value, int):
        return value
    if value not in facts.dims:
        raise ConfigError(f"rule {rule.name} uses dim {value!r}, which the config does not define")
    return facts.dims[value]


def _fused_rows(rule: Rule, facts: Facts) -> tuple[int, int] | None:
    if not rule.fused:
        return None
    sizes = [_dim(name, rule, facts) for name in rule.fused]
    start = sum(sizes[: rule.piece])
    return start, start + sizes[rule.piece]
