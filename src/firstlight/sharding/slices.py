"""Owns which part of each tensor a rank holds; pure integers, no file offsets and no tensor.

A degree is legal for an axis of G granules when it divides G, or, for replicable axes, G divides
it. The degree of the experts' width is `Layout.expert_tp`, that of every other axis `Layout.tp`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, gcd, prod

from firstlight.errors import LayoutError
from firstlight.sharding.codecs import dtype_bytes
from firstlight.sharding.layout import Layout, Place, stage_layers
from firstlight.sharding.rules import (
    EXPERT,
    ONCE,
    REPLICATED,
    VOCABULARY_GRANULE,
    Axis,
    Facts,
    TensorRule,
)


@dataclass(frozen=True)
class Slice:
    """The run [start, stop) a rank holds along `dim`; `padded` elements follow as zeros in memory.

    `zero` marks a tensor held as zeros by this rank (axis `once` on ranks other than the first).
    """

    dim: int
    start: int
    stop: int
    padded: int = 0
    zero: bool = False

    @property
    def length(self) -> int:
        """Elements along `dim` in memory, padding included."""
        return self.stop - self.start + self.padded


def granule_count(axis: Axis, elements: int, group: int = 1) -> int:
    """Returns G: the largest number of equal granules that cut neither a piece nor a codec group.

    `elements` is the tensor's length along the axis, `group` how many of them share a scale.
    """
    if axis.ragged:
        return axis.pieces
    per_piece = elements // axis.pieces
    pieces_per_granule = group // gcd(group, per_piece)
    if axis.pieces % pieces_per_granule:
        return 1
    return axis.pieces // pieces_per_granule


def is_legal(axis: Axis, granules: int, degree: int) -> bool:
    """Says whether an axis of G granules may be cut into `degree` parts."""
    if axis.ragged:
        return True
    return granules % degree == 0 or (axis.replicable and degree % granules == 0)


def legal_degrees(axes: Mapping[str, Axis], limit: int = 1024) -> list[int]:
    """Returns every TP degree up to `limit` that all axes allow; the experts' width is not asked,
    since EP can take any part of its degree (`legal_expert_degrees`).
    """
    dense = [a for a in axes.values() if a.name != EXPERT]
    return [d for d in range(1, limit + 1) if all(is_legal(a, a.pieces, d) for a in dense)]


def legal_expert_degrees(axes: Mapping[str, Axis], limit: int = 1024) -> list[int]:
    """Returns every number of ways, up to `limit`, that the width of one expert may be cut."""
    expert = axes.get(EXPERT)
    return [d for d in range(1, limit + 1) if expert is None or is_legal(expert, expert.pieces, d)]


def check_layout(facts: Facts, layout: Layout) -> None:
    """Raises LayoutError, listing the legal degrees and why, when the model cannot be cut so."""
    legal = legal_degrees(facts.axes, max(64, layout.tp))
    if layout.tp not in legal:
        bad = [
            _describe(a)
            for a in facts.axes.values()
            if not is_legal(a, a.pieces, layout.expert_tp if a.name == EXPERT else layout.tp)
        ]
        raise LayoutError(
            f"tp {layout.tp} does not divide {', '.join(bad)}; legal tp for this model: "
            + ", ".join(str(d) for d in legal if d <= 64)
        )
    if layout.pp > 1:
        stage_layers(facts.num_layers, layout, 0)
    _check_experts(facts, layout)


def _check_experts(facts: Facts, layout: Layout) -> None:
    if layout.ep > 1 and (not facts.num_experts or facts.num_experts % layout.ep):
        raise LayoutError(f"ep {layout.ep} does not divide the model's {facts.num_experts} experts")
    ways = legal_expert_degrees(facts.axes, max(64, layout.expert_tp))
    if facts.num_experts and layout.expert_tp not in ways:
        raise LayoutError(
            f"tp x dp / ep = {layout.expert_tp} does not divide {_describe(facts.axes[EXPERT])}; "
            f"legal: {', '.join(str(d) for d in ways if d <= 64)}. A larger ep keeps experts whole"
        )


def _describe(axis: Axis) -> str:
    noun = "piece" if axis.pieces == 1 else "pieces"
    return f"{axis.name} ({axis.pieces} {noun}{f' of one {axis.piece}' if axis.piece else ''})"


def slice_for(tensor: TensorRule, facts: Facts, place: Place) -> Slice | None:
    """Returns what a rank holds of a tensor, None when it belongs to another rank or to none.

    Raises LayoutError when the axis cannot be cut by this layout.
    """
    if not _is_held(tensor, facts, place):
        return None
    if tensor.axis in (REPLICATED, ONCE):
        first = tensor.axis == REPLICATED or place.tp_index == 0
        length = tensor.shape[tensor.dim] if tensor.shape else 1
        return Slice(tensor.dim, 0, length, zero=not first)
    degree, index = _degree_and_index(tensor, place)
    return cut(facts.axes[tensor.axis], tensor.shape[tensor.dim], degree, index, dim=tensor.dim)


def _is_held(tensor: TensorRule, facts: Facts, place: Place) -> bool:
    if tensor.unused or not holds_unit(tensor, facts, place):
        return False
    if tensor.expert is None:
        return True
    return tensor.expert // (facts.num_experts // place.layout.ep) == place.ep_index


def cut(axis: Axis, elements: int, degree: int, index: int, *, dim: int = 0) -> Slice:
    """Returns part `index` of `degree` of an axis that is `elements` long in this tensor."""
    if axis.ragged:
        share = ceil(ceil(elements / degree) / VOCABULARY_GRANULE) * VOCABULARY_GRANULE
        start, stop = min(elements, index * share), min(elements, (index + 1) * share)
        return Slice(dim, start, stop, padded=share - (stop - start) if degree > 1 else 0)
    if not is_legal(axis, axis.pieces, degree):
        raise LayoutError(f"{axis.name} has {axis.pieces} pieces and cannot be cut {degree} ways")
    per_piece = elements // axis.pieces
    if axis.pieces >= degree:
        first, count = index * axis.pieces // degree, axis.pieces // degree
    else:
        first, count = index * axis.pieces // degree, 1
    return Slice(dim, first * per_piece, (first + count) * per_piece)


def local_shape(tensor: TensorRule, part: Slice) -> tuple[int, ...]:
    """Returns the shape a rank allocates for its part, padding included."""
    if not tensor.shape:
        return ()
    return (*tensor.shape[: part.dim], part.length, *tensor.shape[part.dim + 1 :])


def holds_unit(tensor: TensorRule, facts: Facts, place: Place) -> bool:
    """Says whether a rank's pipeline stage reads this tensor at all."""
    layout = place.layout
    if layout.pp == 1:
        return True
    if tensor.layer is not None:
        return tensor.layer in stage_layers(facts.num_layers, layout, place.pp_index)
    last = place.pp_index == layout.pp - 1
    if tensor.unit == "embed":
        return place.pp_index == 0 or (last and "tied" in facts.flags)
    return last if tensor.unit == "head" else place.pp_index == 0


def covers_once(tensor: TensorRule, facts: Facts, layout: Layout) -> bool:
    """Proves that the ranks' slices use every element: exactly once, or equally often where the
    axis is declared replicated."""
    uses: dict[tuple[int, int], int] = {}
    for rank in range(layout.world_size):
        part = slice_for(tensor, facts, layout.place(rank))
        if part is not None and part.stop > part.start:
            uses[(part.start, part.stop)] = uses.get((part.start, part.stop), 0) + 1
    return _tiles(uses, tensor.shape[tensor.dim] if tensor.shape else 1)


def _tiles(uses: Mapping[tuple[int, int], int], length: int) -> bool:
    at = 0
    for start, stop in sorted(uses):
        if start != at:
            return False
        at = stop
    return at == length and len(set(uses.values())) == 1


def _degree_and_index(tensor: TensorRule, place: Place) -> tuple[int, int]:
    if tensor.expert is not None:
        return place.layout.expert_tp, place.expert_tp_index
    return place.layout.tp, place.tp_index


def held_bytes(
    tensors: Iterable[TensorRule], facts: Facts, place: Place, *, element_bytes: int
) -> int:
    """Returns the bytes a rank allocates: `element_bytes` a value, or what a rule's dtype takes."""
    total = 0
    sizes: dict[tuple[object, ...], int] = {}  # the experts of a layer are alike
    for tensor in tensors:
        if not _is_held(tensor, facts, place):
            continue
        kind = (tensor.shape, tensor.axis, tensor.dim, tensor.dtype, tensor.expert is None)
        if kind not in sizes:
            part = slice_for(tensor, facts, place)
            assert part is not None, "what is held has a slice"
            width = dtype_bytes(tensor.dtype) if tensor.dtype else element_bytes
            sizes[kind] = width * prod(local_shape(tensor, part))
        total += sizes[kind]
    return total
