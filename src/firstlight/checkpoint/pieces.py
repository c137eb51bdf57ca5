"""Owns a rank's weights as pieces that can be read one by one, again and again.

Knows what belongs to a piece and which reads fill it; not where it is put, when, or why.

A piece is what moves as one: a layer without its routed experts, one routed expert of a layer, or
(only once) everything outside the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from blake3 import blake3

from firstlight.checkpoint.digests import Entries, rank_digest
from firstlight.checkpoint.executor import Job, Worker
from firstlight.checkpoint.fill_granules import granule_job
from firstlight.checkpoint.fill_tensors import tensor_job, zero_what_is_not_read
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.granule_plan import GranuleRead, plan_granule_reads
from firstlight.checkpoint.loader import check_family
from firstlight.checkpoint.names import WeightSpec, prove_tied, require_match
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.read_plan import Target, TensorRead, plan_tensor_reads, targets_of
from firstlight.checkpoint.store import Store
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.checkpoint.torch_types import bytes_of
from firstlight.errors import DigestMismatch
from firstlight.sharding.layout import Place
from firstlight.sharding.slices import check_layout

Parameters = Mapping[str, torch.Tensor]
HOST_MEMORY = Path("host memory")  # stands for a file where there is none


class PieceKey(NamedTuple):
    """Names a piece; -1 for `layer` is everything outside the layers, for `expert` no expert."""

    layer: int
    expert: int = -1

    def __str__(self) -> str:
        if self.layer < 0:
            return "outside the layers"
        return f"layer {self.layer}" + (f", expert {self.expert}" if self.expert >= 0 else "")


OUTSIDE = PieceKey(-1)


class Piece(NamedTuple):
    """What fills a piece; its targets are not stacked: an expert's tensors are its own."""

    key: PieceKey
    targets: tuple[Target, ...]
    reads: tuple[GranuleRead | TensorRead, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes read from files."""
        return sum(read.num_bytes for read in self.reads)


class WeightPieces:
    """All pieces of one rank over an open source.

    `check` has what is read compared with recorded digests: those of a store, or those taken when
    a piece of a checkpoint was read first. `direct` passes by the page cache where it can.
    """

    def __init__(
        self,
        source: Store | Checkpoint,
        spec: WeightSpec,
        place: Place,
        *,
        check: bool = True,
        direct: bool = False,
    ) -> None:
        """Raises what `load_into` raises before it reads."""
        check_layout(spec.facts, place.layout)
        self._source, self._check, self._direct = source, check, direct
        self._files: dict[str, InputFile] = {}
        self._entries: dict[str, Entries] = {}
        self._digests: dict[PieceKey, dict[str, bytes]] = {}
        targets = targets_of(spec, place)
        if isinstance(source, Store):
            check_family(source, spec)
            reads: Sequence[Any] = plan_granule_reads(source.manifest.units, targets)
        else:
            report = require_match(source, spec)
            if check:
                refuse_errors(prove_tied(source, report), str(source.path))
            reads = plan_tensor_reads(report, targets)
        self._names = tuple(dict.fromkeys(target.name for target in targets))
        self.pieces: Mapping[PieceKey, Piece] = _pieces(targets, reads)
        self._order = [_key_of(_some_target(read)) for read in reads]

    def jobs(self, key: PieceKey, parameters: Parameters, *, check: bool = True) -> list[Job]:
        """Returns the reads that fill a piece's tensors, given by name; zeroes what none fills.

        They compare a store's digests when `check` says so and this rank checks at all.
        """
        piece = self.pieces[key]
        zero_what_is_not_read(parameters, piece.targets)
        if isinstance(self._source, Store):
            checks = check and self._check
            return [self._granule_job(parameters, read, checks) for read in piece.reads]
        reads = (read for read in piece.reads if isinstance(read, TensorRead))
        return [tensor_job(parameters, self._source, read) for read in reads]

    def _granule_job(self, parameters: Parameters, read: Any, check: bool) -> Job:
        assert isinstance(self._source, Store)
        unit = read.unit.name
        if unit not in self._files:
            self._files[unit] = InputFile(self._source.bin_path(unit), direct=self._direct)
        if check and unit not in self._entries:
            self._entries[unit] = self._source.entries(unit)
        return granule_job(
            parameters, self._files[unit], read, self._entries[unit] if check else None
        )

    def compare(self, key: PieceKey, parameters: Parameters) -> None:
        """Compares a piece of a checkpoint, which has no digests, with what it was when it was
        compared first. Does nothing for a store.

        Raises DigestMismatch naming tensor and file.
        """
        if isinstance(self._source, Store) or not self._check:
            return
        found = {
            name: blake3(bytes_of(parameters[name].detach().cpu().contiguous())).digest(16)
            for name in dict.fromkeys(target.name for target in self.pieces[key].targets)
        }
        known = self._digests.setdefault(key, found)
        wrong = [name for name, digest in found.items() if digest != known[name]]
        if wrong:
            raise DigestMismatch(self._changed(key, wrong[0]))

    def _changed(self, key: PieceKey, name: str) -> str:
        read = next(r for r in self.pieces[key].reads if _some_target(r).name == name)
        assert isinstance(read, TensorRead)
        return (
            f"{read.file}: {read.source} ({key}) is not what it was when it was loaded; the file "
            "has changed or the storage gives wrong bytes. Weights cannot be made anew: start "
            "again from files that stay as they are, or from a store"
        )

    def digest(self) -> str:
        """Returns the digest of what this rank holds: of a store the one a whole load returns, of a
        checkpoint one over every piece that was compared. Empty when nothing is checked."""
        if not self._check:
            return ""
        if isinstance(self._source, Store):
            return rank_digest(self._granule_digests())
        hasher = blake3()
        for name in self._names:
            hasher.update(f"{name}\0".encode())
            for _, found in sorted(self._digests.items()):
                if name in found:
                    hasher.update(found[name])
        return hasher.hexdigest()

    def _granule_digests(self) -> Iterator[bytes]:
        at: dict[PieceKey, int] = {}
        assert isinstance(self._source, Store)
        for key in self._order:
            read = self.pieces[key].reads[at.get(key, 0)]
            at[key] = at.get(key, 0) + 1
            assert isinstance(read, GranuleRead)
            unit = read.unit.name
            entries = self._entries.setdefault(unit, self._source.entries(unit))
            yield entries["digest"][read.entry : read.entry + read.granules].tobytes()

    def close(self) -> None:
        """Closes the files of a store."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def memory_job(key: PieceKey, target: torch.Tensor, source: torch.Tensor) -> Job:
    """Returns the copy of a piece, or a part of it, that is in host memory: uint8 [n] both."""

    def copy(target: torch.Tensor, source: torch.Tensor, _worker: Worker) -> None:
        memoryview(bytes_of(target))[:] = bytes_of(source)

    return Job(str(key), HOST_MEMORY, 0, target.numel(), partial(copy, target, source))


def _key_of(target: Target) -> PieceKey:
    rule = target.rule
    layer = -1 if rule.layer is None else rule.layer
    return PieceKey(layer, -1 if rule.expert is None else rule.expert)


def _some_target(read: GranuleRead | TensorRead) -> Target:
    if isinstance(read, TensorRead):
        return read.target
    return next(target for target in read.targets if target is not None)


def _pieces(
    targets: Iterable[Target], reads: Iterable[GranuleRead | TensorRead]
) -> dict[PieceKey, Piece]:
    own_targets: dict[PieceKey, list[Target]] = {}
    for target in targets:
        own_targets.setdefault(_key_of(target), []).append(_alone(target))
    own_reads: dict[PieceKey, list[GranuleRead | TensorRead]] = {key: [] for key in own_targets}
    for read in reads:
        own_reads[_key_of(_some_target(read))].append(_of_alone(read))
    return {key: Piece(key, tuple(own), tuple(own_reads[key])) for key, own in own_targets.items()}


def _alone(target: Target) -> Target:
    return target if target.stacked is None else msgspec.structs.replace(target, stacked=None)


def _of_alone(read: GranuleRead | TensorRead) -> GranuleRead | TensorRead:
    if isinstance(read, TensorRead):
        return msgspec.structs.replace(read, target=_alone(read.target))
    if all(target is None or target.stacked is None for target in read.targets):
        return read
    alone = tuple(None if target is None else _alone(target) for target in read.targets)
    return msgspec.structs.replace(read, targets=alone)
