"""Owns the proof that weights in memory are still those that were loaded, down to one flipped bit.

Works on any device with integer sums alone. Knows no engine; what to do about damage is decided
elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from firstlight.checkpoint.names import WeightSpec
from firstlight.checkpoint.read_plan import Target, targets_of
from firstlight.errors import CheckFailed
from firstlight.sharding.layout import Place
from firstlight.sharding.rules import VOCABULARY_GRANULE, TensorRule

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TILE = 2**20  # values weighed at once: 16 MiB of memory beside the weights
_COPY_BYTES = 64 * 2**20  # of experts laid out anew at once, granule by granule


@dataclass(frozen=True)
class Damage:
    """A run of weights whose bits are not those of the baseline. `expert` is None outside experts;
    `granule` counts along the cut axis of the whole tensor, as pieces of the model's axis."""

    rank: int
    unit: str
    tensor: str
    expert: int | None
    granule: int

    def line(self) -> str:
        """Returns the damage as one line of text."""
        expert = "" if self.expert is None else f", expert {self.expert}"
        return f"rank {self.rank}: {self.unit}, {self.tensor}{expert}, granule {self.granule}"


@dataclass(frozen=True)
class _Watched:
    """One parameter in granules: `piece` values long along the dim it is cut along, from `first`
    on; `experts` are the ids stacked in it, (None,) for one that has none."""

    rule: TensorRule
    experts: tuple[int | None, ...]
    dim: int
    length: int
    piece: int
    first: int

    @property
    def granules(self) -> int:
        """Granules of one expert; the last may be short."""
        return -(-self.length // self.piece)

    def sums(self, tensor: Tensor) -> Tensor:
        """Returns the checksum of every granule, int64 [experts * granules]."""
        if not self.rule.stacked:
            tensor = tensor.unsqueeze(0)
        if not self.rule.shape:
            return checksums(tensor.view(1, 1))
        step = max(1, _COPY_BYTES * len(tensor) // max(1, tensor.nbytes))
        return torch.cat([self._sums(some) for some in torch.split(tensor, step)])

    def _sums(self, tensor: Tensor) -> Tensor:
        """As `sums`, for some of the experts."""
        dim, whole = self.dim + 1, self.length // self.piece * self.piece
        run, found = tensor.narrow(dim, 0, whole), []
        if whole:
            shape = (*run.shape[:dim], whole // self.piece, self.piece, *run.shape[dim + 1 :])
            pieces = run.reshape(shape).movedim(dim, 1)
            found.append(checksums(pieces.flatten(2).flatten(0, 1)))
        if whole < self.length:  # ragged: no experts
            found.append(checksums(tensor.narrow(dim, whole, self.length - whole).flatten(1)))
        return torch.cat(found)


class WeightWatch:
    """Checksums of a rank's weights as they were when this was made, to compare with later.

    Make it when loading has ended, and again after weights were replaced or repacked in place.
    """

    def __init__(self, parameters: Mapping[str, Tensor], spec: WeightSpec, place: Place) -> None:
        """Takes the baseline: reads every parameter once."""
        self._place, self._parameters = place, parameters
        self._watched = _watched(parameters, spec, place)
        self._sums = self._measure()

    def check(self) -> list[Damage]:
        """Reads every parameter again and returns what is no longer as it was."""
        found = []
        for watched, then, now in zip(self._watched, self._sums, self._measure(), strict=True):
            for number in (then != now).nonzero().flatten().tolist():
                expert, granule = divmod(number, watched.granules)
                rule = watched.rule
                found.append(
                    Damage(
                        self._place.rank,
                        rule.unit,
                        rule.name,
                        watched.experts[expert],
                        watched.first + granule,
                    )
                )
        return found

    def digest(self) -> str:
        """Returns a digest of everything watched: equal on ranks that hold the same."""
        hasher = blake3()
        for watched, sums in zip(self._watched, self._sums, strict=True):
            hasher.update(watched.rule.name.encode())
            hasher.update(sums.numpy().tobytes())
        return hasher.hexdigest()

    def parts(self) -> dict[tuple[Any, ...], bytes]:
        """Returns a digest of each parameter by what it is a part of: parameter, run along its cut
        dim, experts. Ranks that have a key in common must have its digest in common."""
        return {
            (w.rule.name, w.first, w.length, w.experts): blake3(sums.numpy().tobytes()).digest(16)
            for w, sums in zip(self._watched, self._sums, strict=True)
        }

    def _measure(self) -> list[Tensor]:
        return [w.sums(self._parameters[w.rule.name].detach()).cpu() for w in self._watched]


def checksums(rows: Tensor) -> Tensor:
    """Returns for each row [G, n] the sum of (2i + 1) times the bits of its i-th value, modulo
    2^64, as int64 [G] on the device.

    Weights are odd, so any one flipped bit changes the sum.
    """
    bits = rows.contiguous().view(_INTEGERS[rows.element_size()])
    count, length = bits.shape
    totals = torch.zeros(count, dtype=torch.int64, device=rows.device)
    step = max(1, _TILE // max(1, min(length, _TILE)))
    for start in range(0, length, _TILE):
        stop = min(length, start + _TILE)
        weights = torch.arange(2 * start + 1, 2 * stop + 1, 2, device=rows.device)
        for row in range(0, count, step):
            tile = bits[row : row + step, start:stop].long()
            totals[row : row + step] += (tile * weights).sum(1)
    return totals


def _watched(
    parameters: Mapping[str, Tensor], spec: WeightSpec, place: Place
) -> tuple[_Watched, ...]:
    targets: dict[str, list[Target]] = {}
    for target in targets_of(spec, place):
        if target.name in parameters and target.part.stop > target.part.start:
            targets.setdefault(target.name, []).append(target)
    found = []
    for same in targets.values():
        rule, part = same[0].rule, same[0].part
        axis = spec.facts.axes.get(rule.axis)
        length = part.stop - part.start
        piece = length
        if axis is not None and rule.shape:
            piece = (
                VOCABULARY_GRANULE if axis.ragged else max(1, rule.shape[rule.dim] // axis.pieces)
            )
        experts = tuple(target.rule.expert for target in same)
        found.append(_Watched(rule, experts, part.dim, length, piece, part.start // piece))
    return tuple(found)


def agree_on_weights(
    watch: WeightWatch, place: Place, version: str, *, group: dist.ProcessGroup | None = None
) -> None:
    """Returns when all ranks hold the same version, and equal values wherever they share tensors.

    Every rank of the group must call it. Raises CheckFailed on all of them, naming the ranks that
    differ and the tensors.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (place.rank, version, watch.parts()), group=group)
    found = [*_versions(everyone), *_differences(everyone)]
    if found:
        raise CheckFailed("ranks hold different weights: " + "; ".join(found[:20]))


def _versions(everyone: Sequence[Any]) -> list[str]:
    versions: dict[str, list[int]] = {}
    for rank, version, _ in everyone:
        versions.setdefault(version, []).append(rank)
    if len(versions) == 1:
        return []
    return [f"ranks {ranks} loaded version {version[:16]}" for version, ranks in versions.items()]


def _differences(everyone: Sequence[Any]) -> list[str]:
    """Compares parts that several ranks hold; the fewest are said to differ."""
    holders: dict[tuple[Any, ...], dict[bytes, list[int]]] = {}
    for rank, _, parts in everyone:
        for key, digest in parts.items():
            holders.setdefault(key, {}).setdefault(digest, []).append(rank)
    found = []
    for key, by_digest in holders.items():
        if len(by_digest) > 1:
            fewest = min(reversed(by_digest.values()), key=len)
            others = sorted(r for ranks in by_digest.values() for r in ranks if r not in fewest)
            found.append(f"{key[0]} on ranks {fewest} differs from ranks {others}")
    return found
