"""Owns what a rule table can say and how it expands to concrete tensors; knows no model and no
file.

A family's `weights.py` is one RuleTable: for each source tensor our name, its shape in words of the
config, the axis along which it is cut and the dim that axis lies on. Inspect, plan, converter,
loader, runtime sums, verification and training read this and nothing else.

Axis kinds. `replicated`: every rank holds all. `once`: rank 0 of a sum holds the values, the others
zeros (a bias added after a partial sum). Any other name is an Axis of the model's Facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import Formatter

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
    equal runs and the last ranks may hold fewer or none (vocabulary; a piece is 64 rows).
    """

    name: str
    pieces: int
    replicable: bool = False
    ragged: bool = False


@dataclass(frozen=True)
class Rule:
    """One line of a table. `source` and `name` may hold {layer} and {expert}.

    `when` names a flag or a layer set of Facts (empty: always). `fused` names the dims stacked
    along dim 0 of one source tensor, of which this rule takes number `piece`. `optional` tensors
    may be missing from a checkpoint.
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


@dataclass(frozen=True)
class Ignored:
    """Source names a checkpoint may carry and the model does not use; `reason` is shown to
    people.
    """

    pattern: str
    reason: str
    when: str = ""


@dataclass(frozen=True)
class RuleTable:
    """All rules of a family. `sums` names the modules whose output is summed over tensor parallel
    ranks; `tied` maps a parameter name to the one it shares when the flag `tied` is set."""

    family: str
    version: int
    rules: tuple[Rule, ...]
    sums: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    ignored: tuple[Ignored, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a config says, in the words the rule table uses."""

    num_layers: int
    dims: Mapping[str, int]
    axes: Mapping[str, Axis]
    layer_sets: Mapping[str, frozenset[int]] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    num_experts: int = 0


@dataclass(frozen=True)
class TensorRule:
    """One concrete tensor of a model: where it comes from, what it is called and how it is cut.

    `source_rows` is the run of rows of a fused source tensor, None when the tensor is taken whole.
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


def width_axis(name: str, width: int, largest_piece: int = 32) -> Axis:
    """Returns the axis of a feed-forward width, in pieces of the largest divisor up to 32
    columns.
    """
    piece = max(d for d in range(1, largest_piece + 1) if width % d == 0)
    return Axis(name, width // piece)


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
    """Says whether a rule guarded by `when` holds for a layer (None: outside the layers)."""
    if not when:
        return True
    if when in facts.layer_sets:
        return layer in facts.layer_sets[when]
    return when in facts.flags


def _expand_rule(rule: Rule, facts: Facts, layer: int | None) -> Iterator[TensorRule]:
    if not applies(rule.when, facts, layer):
        return
    shape = tuple(_dim(d, rule, facts) for d in rule.shape)
    if rule.axis not in (REPLICATED, ONCE) and rule.axis not in facts.axes:
        raise ConfigError(f"rule {rule.name} is cut along {rule.axis!r}, which the model lacks")
    experts = range(facts.num_experts) if "{expert}" in rule.source else (None,)
    rows = _fused_rows(rule, facts)
    for expert in experts:
        fields = {"layer": layer, "expert": expert}
        name = _fill(rule.name, fields)
        yield TensorRule(
            source=_fill(rule.source, fields),
            name=name,
            unit=unit_of(name),
            shape=shape,
            axis=rule.axis,
            dim=rule.dim,
            layer=layer,
            expert=expert,
            source_rows=rows,
            optional=rule.optional,
        )


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


def _fill(pattern: str, fields: Mapping[str, int | None]) -> str:
    used = {name for _, name, _, _ in Formatter().parse(pattern) if name}
    return pattern.format(**{name: fields[name] for name in used}) if used else pattern
