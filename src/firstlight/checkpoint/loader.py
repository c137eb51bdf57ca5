"""Owns the filling of a rank's parameters from a checkpoint; knows no module and builds no model.

Every parameter is filled whole or the load fails; nothing is converted but the element type.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from blake3 import blake3

from firstlight.checkpoint.digests import Entries, rank_digest
from firstlight.checkpoint.executor import Job, Patience, RunReport, Worker, run_jobs
from firstlight.checkpoint.fill_granules import granule_job
from firstlight.checkpoint.fill_tensors import tensor_job, zero_what_is_not_read
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.fresh_memory import with_memory_ahead
from firstlight.checkpoint.granule_plan import GranuleRead, plan_granule_reads
from firstlight.checkpoint.names import WeightSpec, prove_tied, require_match
from firstlight.checkpoint.positioned_io import InputFile
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.read_plan import (
    Target,
    kept_types,
    plan_tensor_reads,
    shapes_of,
    targets_of,
)
from firstlight.checkpoint.shared_reading import fill_from_leader
from firstlight.checkpoint.store import Store
from firstlight.checkpoint.store_layout import BlockRecord, UnitRecord, gaps
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.checkpoint.torch_types import TORCH_TYPES, bytes_of
from firstlight.errors import DigestMismatch, StoreError, TensorError, UsageError
from firstlight.sharding.layout import Place
from firstlight.sharding.slices import check_layout

_MEMORY = Path("memory")

Parameters = Mapping[str, torch.Tensor]
Runner = Callable[..., RunReport]
_MOST_TIMES = 4
_DIRECT_TIMES = 2
# Below this much, or where most of a sample is in the page cache, reads go through it.
_DIRECT_FROM = 256 * 2**20
_SAMPLE = 32


@dataclass(frozen=True)
class LoadReport:
    """What a load did. `seconds_by_phase` adds up to its wall time; `thread_seconds` is what the
    reading threads spent by activity, summed over them. `digest` is the rank's, empty if unchecked.
    `threads` read in the end; `direct`: they passed by the page cache.
    """

    bytes_read: int
    seconds_by_phase: Mapping[str, float]
    thread_seconds: Mapping[str, float]
    digest: str
    threads: int = 0
    direct: bool = False


def load_into(
    parameters: Mapping[str, torch.Tensor],
    source: Store | Checkpoint,
    spec: WeightSpec,
    place: Place,
    *,
    progress: Progress | None = None,
    threads: int = 2,
    check: bool = True,
    patience: Patience | None = None,
    direct: bool | None = None,
    leader_of: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fills `parameters` (our names, `local_shape` of each, experts stacked) with a rank's weights.

    Any float dtype will do where the rule names none; a rule's own dtype must be kept.

    `threads` are read with at first, up to four times as many where that is faster. `direct` passes
    by the page cache; None decides by what is in it. `leader_of` a group (of all ranks that load,
    able to move host memory) has its first rank read the store for all of them.

    `check` has stored digests compared while loading, tied tensors proven equal, and the rank's
    digest computed. Raises TensorError for names and shapes that do not fit, DigestMismatch for
    damaged bytes, LayoutError for an impossible layout, EnvironmentProblem when reads stall.
    """
    clock = _Clock()
    if leader_of is not None and not isinstance(source, Store):
        raise UsageError(
            "one rank can read for all from a store only; `firstlight shard` makes one"
        )
    check_layout(spec.facts, place.layout)
    targets = targets_of(spec, place)
    check_parameters(parameters, spec, targets)
    run = partial(
        run_jobs,
        threads=threads,
        most_threads=_MOST_TIMES * threads,
        progress=progress or silent,
        patience=patience or Patience(),
        who=f"rank {place.rank}" if place.layout.world_size > 1 else "",
    )
    work = _Work(
        clock, run, threads, check, direct, leader_of, progress or silent, patience or Patience()
    )
    if isinstance(source, Store):
        return _fill_from_store(parameters, source, spec, targets, work)
    return _fill_from_checkpoint(parameters, source, spec, targets, work)


class _Clock:
    """Cuts wall time into phases without gaps."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


class _Work(NamedTuple):
    """What both kinds of source need to do their part."""

    clock: _Clock
    run: Runner
    threads: int
    check: bool
    direct: bool | None
    leader_of: dist.ProcessGroup | None
    progress: Progress
    patience: Patience


def _fill_from_checkpoint(
    parameters: Parameters,
    source: Checkpoint,
    spec: WeightSpec,
    targets: Sequence[Target],
    work: _Work,
) -> LoadReport:
    report = require_match(source, spec)
    targets = _wanted(parameters, source.tensors, targets)
    reads = plan_tensor_reads(report, targets)
    work.clock.lap("plan")
    if work.check:
        refuse_errors(prove_tied(source, report), str(source.path))
        work.clock.lap("tied")
    zero_what_is_not_read(parameters, targets)
    ran = work.run([tensor_job(parameters, source, read) for read in reads], phase="load")
    work.clock.lap("load")
    digest = ""
    if work.check:
        digest = _digest_parameters(parameters, targets, work.run)
        work.clock.lap("digest")
    num_bytes = sum(read.num_bytes for read in reads)
    return LoadReport(num_bytes, work.clock.seconds, ran.seconds, digest, ran.threads)


def _fill_from_store(
    parameters: Parameters, source: Store, spec: WeightSpec, targets: Sequence[Target], work: _Work
) -> LoadReport:
    check_family(source, spec)
    held = {name for unit in source.manifest.units for b in unit.blocks for name in _sources(b)}
    targets = _wanted(parameters, held, targets)
    reads = plan_granule_reads(source.manifest.units, targets)
    names = list(dict.fromkeys(read.unit.name for read in reads))
    entries = {name: source.entries(name) for name in names} if work.check else {}
    zero_what_is_not_read(parameters, targets)
    work.clock.lap("plan")
    if work.leader_of is not None:
        group, direct = work.leader_of, False
        ran = fill_from_leader(
            parameters,
            source,
            reads,
            entries,
            group=group,
            progress=work.progress,
            patience=work.patience,
        )
    else:
        ran, direct = _read_own(parameters, source, reads, entries, work)
    work.clock.lap("load")
    digest = ""
    if work.check:
        digest = rank_digest(
            entries[r.unit.name]["digest"][r.entry : r.entry + r.granules].tobytes() for r in reads
        )
    num_bytes = sum(read.num_bytes for read in reads)
    return LoadReport(num_bytes, work.clock.seconds, ran.seconds, digest, ran.threads, direct)


def _read_own(
    parameters: Parameters,
    source: Store,
    reads: Sequence[GranuleRead],
    entries: Mapping[str, Entries],
    work: _Work,
) -> tuple[RunReport, bool]:
    """Makes a rank's reads; says whether they passed by the page cache."""
    direct = _passes_cache(source, reads) if work.direct is None else work.direct
    names = dict.fromkeys(read.unit.name for read in reads)
    files = {name: InputFile(source.bin_path(name), direct=direct) for name in names}
    jobs = [granule_job(parameters, files[r.unit.name], r, entries.get(r.unit.name)) for r in reads]
    jobs = with_memory_ahead(parameters, reads, jobs)
    # Past the page cache a thread waits for the device: others hash and place meanwhile.
    threads = work.threads * _DIRECT_TIMES if direct else work.threads
    ran = work.run(jobs, phase="load", threads=threads)
    if work.check:
        for name, file in files.items():
            _check_gaps(source.units[name], file)
    passed = any(file.direct for file in files.values())
    for file in files.values():
        file.close()
    return ran, passed


def _check_gaps(unit: UnitRecord, file: InputFile) -> None:
    """Raises DigestMismatch when a unit holds something where no block is."""
    for offset, num_bytes in gaps(unit):
        if file.read(offset, num_bytes).strip(b"\0"):
            raise DigestMismatch(
                f"{file.path}: the padding from byte {offset} on is not zero; the file is damaged. "
                "`firstlight verify` lists all damage; make the store again"
            )


def _passes_cache(source: Store, reads: Sequence[GranuleRead]) -> bool:
    """Says whether to pass by the page cache: for much that is not in it."""
    if sum(read.num_bytes for read in reads) < _DIRECT_FROM:
        return False
    sample = reads[:: max(1, len(reads) // _SAMPLE)]
    cached = 0
    for read in sample:
        file = InputFile(source.bin_path(read.unit.name))
        cached += file.is_cached(read.offset + read.num_bytes // 2)
        file.close()
    return cached * 2 < len(sample)


def _sources(block: BlockRecord) -> Iterator[str]:
    for part in block.parts:
        yield from part.sources


def check_family(store: Store, spec: WeightSpec) -> None:
    """Raises StoreError when a store was made with another rule table than the program has."""
    table, manifest = spec.family.table, store.manifest
    if (manifest.family, manifest.rule_version) != (table.family, table.version):
        raise StoreError(
            f"{store.path}: made for family {manifest.family}, rule table {manifest.rule_version}; "
            f"this program has {table.family}, {table.version}. Make the store again"
        )


def _wanted(
    parameters: Parameters, held: Container[str], targets: Sequence[Target]
) -> list[Target]:
    """Returns the rank's targets, without optional tensors that neither side has."""
    return [
        target
        for target in targets
        if target.name in parameters
        or not (target.rule.optional and target.rule.source not in held)
    ]


def check_parameters(
    parameters: Mapping[str, torch.Tensor], spec: WeightSpec, targets: Sequence[Target]
) -> None:
    """Raises TensorError listing every parameter that is absent, unknown, or of another shape or
    type.

    A tied alias may be given only if it shares its memory with its twin.
    """
    wanted, kept = shapes_of(targets), kept_types(spec)
    optional = {rule.name for rule in spec.tensors if rule.optional}
    tied = dict(spec.family.table.tied) if "tied" in spec.facts.flags else {}
    wrong = [f"{n}: not allocated" for n in wanted if n not in parameters and n not in optional]
    for name, tensor in parameters.items():
        twin = parameters.get(tied.get(name, ""))
        if name in wanted:
            if tuple(tensor.shape) != wanted[name]:
                wrong.append(f"{name}: allocated {list(tensor.shape)}, needs {list(wanted[name])}")
            elif defect := _type_defect(tensor.dtype, kept.get(name, "")):
                wrong.append(f"{name}: {defect}")
        elif twin is None or twin.data_ptr() != tensor.data_ptr():
            wrong.append(f"{name}: no rule of the family fills it")
    if wrong:
        raise TensorError("parameters do not fit the model:\n  " + "\n  ".join(wrong))


def _type_defect(allocated: torch.dtype, kept: str) -> str:
    """Says what is wrong with a parameter's type, empty if nothing is."""
    if kept:
        same = allocated == TORCH_TYPES[kept]
        return "" if same else f"allocated as {allocated}, keeps {TORCH_TYPES[kept]}"
    if not allocated.is_floating_point:
        return f"allocated as {allocated}, needs a floating point type"
    return ""


def _digest_parameters(
    parameters: Mapping[str, torch.Tensor],
    targets: Sequence[Target],
    run: Runner,
) -> str:
    """Hashes every parameter as it now is, in the order of the rule table."""
    names = list(dict.fromkeys(target.name for target in targets))
    units = {target.name: target.rule.unit for target in targets}
    digests: dict[str, bytes] = {}

    def hash_one(name: str, worker: Worker) -> None:
        started = perf_counter()
        tensor = parameters[name].detach().cpu().contiguous()
        digests[name] = blake3(bytes_of(tensor)).digest(16)
        worker.spend("hash", started)

    jobs = []
    for name in names:
        num_bytes = parameters[name].numel() * parameters[name].element_size()
        jobs.append(Job(units[name], _MEMORY, 0, num_bytes, partial(hash_one, name)))
    run(jobs, phase="digest")
    hasher = blake3()
    for name in names:
        hasher.update(f"{name}\0".encode())
        hasher.update(digests[name])
    return hasher.hexdigest()
