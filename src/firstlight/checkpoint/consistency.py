"""Owns the proof that weights in memory are still those that were loaded, down to one flipped bit.

Works on any device with integer sums alone. Knows no engine; what to do about damage is decided
elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from firstlight.checkpoint.damage import Damage
from firstlight.checkpoint.names import WeightSpec
from firstlight.checkpoint.watched_weights import Held, Watched, spans_of, watched_weights
from firstlight.errors import CheckFailed
from firstlight.sharding.layout import Place

SPAN_BYTES = 4 * 2**20  # weights are checked in runs of about this much: a millisecond or two


class WeightWatch:
    """Checksums of a rank's weights as they were when this was made, to compare with later.

    Make it when loading has ended, and again after weights were replaced or repacked in place.
    `held` is what kernels read: the tensors, and packed weights in their stead, by parameter name.
    """

    def __init__(self, held: Mapping[str, Held], spec: WeightSpec, place: Place) -> None:
        """Takes the baseline: reads every weight once."""
        self._place = place
        self._watched = watched_weights(held, spec, place)
        self._spans = tuple(spans_of(self._watched, SPAN_BYTES))
        self._next = 0
        self.num_bytes = sum(weight.num_bytes for weight in self._watched)
        self._sums = [
            torch.zeros(len(w.experts) * w.granules, dtype=torch.int64) for w in self._watched
        ]
        self._read(len(self._spans), baseline=True)

    def check(self) -> list[Damage]:
        """Reads every weight again and returns what is no longer as it was."""
        self._next = 0
        return self._read(len(self._spans))

    def begin(self) -> None:
        """Lets `check_some` begin with the first weight again."""
        self._next = 0

    @property
    def is_through(self) -> bool:
        """Says whether `check_some` has come to the end of the weights."""
        return self._next == len(self._spans)

    def check_some(self, num_bytes: int) -> tuple[int, list[Damage]]:
        """Checks about the next `num_bytes`, and at least one granule unless it is through.

        Returns how many bytes were read and what in them is no longer as it was.
        """
        stop, read = self._next, 0
        while stop < len(self._spans) and read < max(1, num_bytes):
            read += self._span_bytes(stop)
            stop += 1
        return read, self._read(stop)

    def digest(self) -> str:
        """Returns a digest of everything watched: equal on ranks that hold the same."""
        hasher = blake3()
        for watched, sums in zip(self._watched, self._sums, strict=True):
            hasher.update(watched.rule.name.encode())
            hasher.update(sums.numpy().tobytes())
        return hasher.hexdigest()

    def parts(self) -> dict[tuple[Any, ...], bytes]:
        """Returns a digest of each parameter by what it is a part of: parameter, run along its cut
        dim, experts, form. Ranks that have a key in common must have its digest in common."""
        return {
            (w.rule.name, w.start, w.length, w.experts, w.form): blake3(
                sums.numpy().tobytes()
            ).digest(16)
            for w, sums in zip(self._watched, self._sums, strict=True)
        }

    def _read(self, stop: int, *, baseline: bool = False) -> list[Damage]:
        """Reads up to span number `stop`; compares with the baseline, or makes it."""
        spans, self._next = self._spans[self._next : stop], stop
        if not spans:
            return []
        # Collected first: one copy from the device for all of them.
        new = torch.cat([self._watched[span.weight].sums(span) for span in spans]).cpu()
        found: list[Damage] = []
        at = 0
        for span in spans:
            watched = self._watched[span.weight]
            first = span.begin * watched.granules + span.first
            count = (span.end - span.begin) * (span.stop - span.first)
            own, known = new[at : at + count], self._sums[span.weight][first : first + count]
            at += count
            if baseline:
                known.copy_(own)
            elif not torch.equal(own, known):
                found.extend(self._damages(watched, first, own != known))
        return found

    def _damages(self, watched: Watched, first: int, differs: Tensor) -> list[Damage]:
        found = []
        for number in differs.nonzero().flatten().tolist():
            expert, granule = divmod(first + number, watched.granules)
            piece, end = watched.pieces_of(granule)
            rule, held = watched.rule, watched.experts[expert]
            found.append(
                Damage(self._place.rank, rule.unit, rule.name, held, piece, granules=end - piece)
            )
        return found

    def _span_bytes(self, number: int) -> int:
        span = self._spans[number]
        watched = self._watched[span.weight]
        count = (span.end - span.begin) * (span.stop - span.first)
        return max(1, watched.num_bytes * count // (len(watched.experts) * watched.granules))


def agree_on_weights(
    watch: WeightWatch | None,
    place: Place,
    version: str,
    *,
    problem: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Returns when all ranks hold the same version, and equal values wherever they share tensors.

    Every rank of the group must call it; one that has none says why in `problem`. Raises
    CheckFailed on all of them, naming the ranks that differ and the tensors.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    parts = watch.parts() if watch is not None else {}
    dist.all_gather_object(everyone, (place.rank, version, parts, problem), group=group)
    failed = [f"rank {rank}: {said}" for rank, *_, said in everyone if said]
    if failed:
        raise CheckFailed("; ".join(failed[:20]))
    found = [*_versions(everyone), *_differences(everyone)]
    if found:
        raise CheckFailed("ranks hold different weights: " + "; ".join(found[:20]))


def _versions(everyone: Sequence[Any]) -> list[str]:
    versions: dict[str, list[int]] = {}
    for rank, version, *_ in everyone:
        versions.setdefault(version, []).append(rank)
    if len(versions) == 1:
        return []
    return [f"ranks {ranks} loaded version {version[:16]}" for version, ranks in versions.items()]


def _differences(everyone: Sequence[Any]) -> list[str]:
    """Compares parts that several ranks hold; the fewest are said to differ."""
    holders: dict[tuple[Any, ...], dict[bytes, list[int]]] = {}
    for rank, _, parts, _ in everyone:
        for key, digest in parts.items():
            holders.setdefault(key, {}).setdefault(digest, []).append(rank)
    found = []
    for key, by_digest in holders.items():
        if len(by_digest) > 1:
            fewest = min(reversed(by_digest.values()), key=len)
            others = sorted(r for ranks in by_digest.values() for r in ranks if r not in fewest)
            found.append(f"{key[0]} on ranks {fewest} differs from ranks {others}")
    return found
