"""Owns how weights in memory are cut into granules and summed, plain or packed, on any device.

Knows no rank and keeps no baseline; the sums are of integers alone.

Shape letters: E experts, G granules of one expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from firstlight.checkpoint.names import WeightSpec
from firstlight.checkpoint.read_plan import Target, targets_of
from firstlight.kernels.packed_weight import BLOCK, PackedWeight
from firstlight.sharding.layout import Place
from firstlight.sharding.rules import VOCABULARY_GRANULE, TensorRule

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8
_TILE = 2**20  # values weighed at once: 16 MiB of memory beside the weights

Held = Tensor | PackedWeight


class Face(NamedTuple):
    """A tensor [E, ...] whose dim `dim` holds `length` steps, `piece` of them a granule."""

    tensor: Tensor
    dim: int
    length: int
    piece: int


class Span(NamedTuple):
    """Granules [first, stop) of experts [begin, end) of watched weight number `weight`.

    Of several experts all granules are taken: they are a run of the weight's sums.
    """

    weight: int
    begin: int
    end: int
    first: int
    stop: int


class Watched(NamedTuple):
    """One weight of a rank in granules.

    `faces` are where its values lie; `experts` the ids stacked in it, (None,) for one that has
    none. Of each expert there are `granules`, each `per_granule` pieces of the model's axis long
    but perhaps the last; the first piece is number `piece`, the values begin at `start` of the
    whole tensor and are `length` long. `form` names how they are packed.
    """

    rule: TensorRule
    faces: tuple[Face, ...]
    experts: tuple[int | None, ...]
    granules: int
    per_granule: int
    piece: int
    start: int
    length: int
    form: str

    @property
    def num_bytes(self) -> int:
        """Bytes that are watched."""
        return sum(face.tensor.nbytes for face in self.faces)

    def sums(self, span: Span) -> Tensor:
        """Returns the checksum of each granule of a span, int64 in the order of experts, on the
        device of the weight."""
        total: Tensor | None = None
        for number, face in enumerate(self.faces):
            own = _face_sums(face, span) * (2 * number + 1)
            total = own if total is None else total + own
        assert total is not None
        return total

    def pieces_of(self, granule: int) -> tuple[int, int]:
        """Returns the pieces [first, stop) of the model's axis that a granule of this rank holds,
        counted in the whole tensor."""
        first = self.piece + granule * self.per_granule
        return first, first + self.per_granule


def watched_weights(
    held: Mapping[str, Held], spec: WeightSpec, place: Place
) -> tuple[Watched, ...]:
    """Returns how the weights a rank holds lie in memory, each once, units in load order.

    `held` has them by the name of their rule, experts stacked.
    """
    targets: dict[str, list[Target]] = {}
    for target in targets_of(spec, place):
        if target.name in held and target.part.stop > target.part.start:
            targets.setdefault(target.name, []).append(target)
    return tuple(_watched(held[name], same, spec) for name, same in targets.items())


def spans_of(weights: Sequence[Watched], largest: int) -> Iterator[Span]:
    """Yields spans that hold every granule once, each of about `largest` bytes or one granule."""
    for index, weight in enumerate(weights):
        experts, granules = len(weight.experts), weight.granules
        per_span = max(1, largest * experts * granules // max(1, weight.num_bytes))
        if per_span >= granules:
            step = per_span // granules
            for begin in range(0, experts, step):
                yield Span(index, begin, min(experts, begin + step), 0, granules)
            continue
        for expert in range(experts):
            for first in range(0, granules, per_span):
                stop = min(granules, first + per_span)
                yield Span(index, expert, expert + 1, first, stop)


def checksums(rows: Tensor) -> Tensor:
    """Returns for each row [G, n] the sum of (2i + 1) times the bits of its i-th value, modulo
    2^64, as int64 [G] on the device. Rows of whole 8-byte words are summed as such.

    Weights are odd, so any one flipped bit changes the sum.
    """
    bits = _integers(rows)
    count, length = bits.shape
    totals = torch.zeros(count, dtype=torch.int64, device=rows.device)
    step = max(1, _TILE // max(1, min(length, _TILE)))
    for start in range(0, length, _TILE):
        stop = min(length, start + _TILE)
        weights = torch.arange(2 * start + 1, 2 * stop + 1, 2, device=rows.device)
        for row in range(0, count, step):
            tile = bits[row : row + step, start:stop].long()
            # A product of matrix and vector takes one pass, where a device has it for integers.
            on_host = tile.device.type == "cpu"
            own = torch.mv(tile, weights) if on_host else (tile * weights).sum(1)
            totals[row : row + step] += own
    return totals


def _integers(rows: Tensor) -> Tensor:
    """The bits of rows as the widest integers that fit."""
    rows = rows.contiguous()
    size = rows.element_size()
    if rows.shape[1] * size % _WORD == 0 and rows.numel():
        if rows.storage_offset() * size % _WORD:
            rows = rows.clone()
        return rows.view(torch.int64)
    return rows.view(_INTEGERS[size])


def _face_sums(face: Face, span: Span) -> Tensor:
    """The checksums of a span on one face; a short last granule is summed by itself."""
    some = face.tensor[span.begin : span.end]
    start, stop = span.first * face.piece, min(face.length, span.stop * face.piece)
    run = some.narrow(face.dim, start, stop - start)
    whole = (stop - start) // face.piece
    found = []
    if whole:
        full = run.narrow(face.dim, 0, whole * face.piece)
        shape = (*full.shape[: face.dim], whole, face.piece, *full.shape[face.dim + 1 :])
        pieces = full.reshape(shape).movedim(face.dim, 1)
        found.append(checksums(pieces.flatten(2).flatten(0, 1)))
    rest = (stop - start) % face.piece
    if rest:  # ragged: no experts
        found.append(checksums(run.narrow(face.dim, whole * face.piece, rest).flatten(1)))
    return torch.cat(found)


def _watched(held: Held, same: Sequence[Target], spec: WeightSpec) -> Watched:
    rule, part = same[0].rule, same[0].part
    axis = spec.facts.axes.get(rule.axis)
    length = part.stop - part.start
    piece = length
    if axis is not None and rule.shape:
        piece = VOCABULARY_GRANULE if axis.ragged else max(1, rule.shape[rule.dim] // axis.pieces)
    form, wide = "", piece
    if isinstance(held, PackedWeight):
        form = held.format
        if part.dim and form in ("affine4", "scaled8"):
            wide = lcm(piece, BLOCK)  # a block shares a scale, and may hold several pieces
        faces = _packed_faces(held, part.dim, length, wide)
    else:
        faces = (_plain_face(held.detach(), rule, part.dim, length, wide),)
    return Watched(
        rule=rule,
        faces=faces,
        experts=tuple(target.rule.expert for target in same),
        granules=-(-length // wide),
        per_granule=wide // piece,
        piece=part.start // piece,
        start=part.start,
        length=length,
        form=form,
    )


def _plain_face(tensor: Tensor, rule: TensorRule, dim: int, length: int, piece: int) -> Face:
    if not rule.stacked:
        tensor = tensor.unsqueeze(0)
    if not rule.shape:
        return Face(tensor.view(1, 1), 1, 1, 1)
    return Face(tensor, dim + 1, length, piece)


def _packed_faces(packed: PackedWeight, dim: int, length: int, piece: int) -> tuple[Face, ...]:
    """Where a packed matrix keeps its rows, or what belongs to runs of its columns."""
    data = packed.data
    if packed.format == "float32" or dim == 0:
        return (Face(data.unsqueeze(0), dim + 1, length, piece),)
    if packed.format == "bfloat16":
        return (Face(data.view(torch.int16).unsqueeze(0), 2, length, piece),)
    blocks, scales = packed.columns // BLOCK, 4 if packed.format == "affine4" else 2
    widths = [2] * (scales // 2)  # bytes a block: one scale, or scale and offset, then its codes
    widths.append(data.shape[1] // blocks - scales)
    starts = [sum(widths[:i]) * blocks for i in range(len(widths))]
    return tuple(
        Face(
            data[:, start : start + width * blocks].view(1, -1, blocks, width),
            2,
            -(-length // BLOCK),
            piece // BLOCK,
        )
        for start, width in zip(starts, widths, strict=True)
    )
