"""Owns which part of each tensor a rank holds; pure integers, no file offsets and no tensor.

Layout is legal for an axis of G granules when TP divides G, or, for replicable axes, G divides TP.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, gcd

from firstlight.errors import LayoutError
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
    """Returns every TP degree up to `limit` that all axes but the experts' allow."""
    dense = [a for a in axes.values() if a.name != EXPERT]
    return [d for d in range(1, limit + 1) if all(is_legal(a, a.pieces, d) for a in dense)]


def check_layout(facts: Facts, layout: Layout) -> None:
    """Raises LayoutError, listing the legal degrees, when the model cannot be cut this way."""
    legal = legal_degrees(facts.axes, max(64, layout.tp))
    if layout.tp not in legal:
        bad = [
            f"{a.name} ({a.pieces} pieces)"
            for a in facts.axes.values()
            if a.name != EXPERT and not is_legal(a, a.pieces, layout.tp)
        ]
        raise LayoutError(
            f"tp {layout.tp} does not divide {', '.join(bad)}; legal tp for this model: "
            + ", ".join(str(d) for d in legal if d <= 64)
        )
    if layout.pp > 1:
        stage_layers(facts.num_layers, layout, 0)
    if layout.ep > 1 and (not facts.num_experts or facts.num_experts % layout.ep):
        raise LayoutError(f"ep {layout.ep} does not divide the model's {facts.num_experts} experts")


def slice_for(tensor: TensorRule, facts: Facts, place: Place) -> Slice | None:
    """Returns what a rank holds of a tensor, None when it belongs to another rank.

    Raises LayoutError when the axis cannot be cut by this layout.
    """
    if not holds_unit(tensor, facts, place):
        return None
    if tensor.expert is not None:
        per_rank = facts.num_experts // place.layout.ep
        if tensor.expert // per_rank != place.ep_index:
            return None
    if tensor.axis in (REPLICATED, ONCE):
        first = tensor.axis == REPLICATED or place.tp_index == 0
        length = tensor.shape[tensor.dim] if tensor.shape else 1
        return Slice(tensor.dim, 0, length, zero=not first)
    degree, index = _degree_and_index(tensor, place)
    return cut(facts.axes[tensor.axis], tensor.shape[tensor.dim], degree, index, dim=tensor.dim)


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


def held_bytes(tensors: Iterable[tuple[TensorRule, int]], facts: Facts, place: Place) -> int:
    """Returns the bytes a rank allocates for (tensor, bytes per element) pairs."""
    total = 0
    for tensor, element_bytes in tensors:
        part = slice_for(tensor, facts, place)
        if part is not None:
            size = element_bytes
            for extent in local_shape(tensor, part):
                size *= extent
            total += size
    return total
