"""Owns the filling of a rank's parameters from a checkpoint; knows no module and builds no model.

Every parameter is filled whole or the load fails; nothing is converted but the element type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from blake3 import blake3

from firstlight.checkpoint.executor import Job, Patience, Worker, run_jobs
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.names import WeightSpec, prove_tied, require_match
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.read_plan import (
    Target,
    TensorRead,
    parameter_shapes,
    plan_tensor_reads,
    targets_of,
)
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.checkpoint.torch_types import TORCH_TYPES, as_tensor, bytes_of
from firstlight.errors import TensorError
from firstlight.sharding.layout import Place
from firstlight.sharding.slices import check_layout

_MEMORY = Path("memory")


@dataclass(frozen=True)
class LoadReport:
    """What a load did. `seconds_by_phase` adds up to its wall time; `thread_seconds` is what the
    reading threads spent by activity, summed over them. `digest` is the rank's, empty if unchecked.
    """

    bytes_read: int
    seconds_by_phase: Mapping[str, float]
    thread_seconds: Mapping[str, float]
    digest: str


def load_into(
    parameters: Mapping[str, torch.Tensor],
    source: Checkpoint,
    spec: WeightSpec,
    place: Place,
    *,
    progress: Progress | None = None,
    threads: int = 2,
    check: bool = True,
    patience: Patience | None = None,
) -> LoadReport:
    """Fills `parameters` (our names, `local_shape` of each, any float dtype) with a rank's weights.

    `check` has stored digests compared while loading, tied tensors proven equal, and the rank's
    digest computed. Raises TensorError for names and shapes that do not fit, DigestMismatch for
    damaged bytes, LayoutError for an impossible layout, EnvironmentProblem when reads stall.
    """
    clock = _Clock()
    check_layout(spec.facts, place.layout)
    check_parameters(parameters, spec, place)
    report = require_match(source, spec)
    targets = [
        t
        for t in targets_of(spec, place)
        if t.name in parameters or not (t.rule.optional and t.rule.source not in source.tensors)
    ]
    reads = plan_tensor_reads(report, targets)
    clock.lap("plan")
    if check:
        refuse_errors(prove_tied(source, report), str(source.path))
        clock.lap("tied")
    zero_what_is_not_read(parameters, targets)
    jobs = [_tensor_job(parameters, source, read) for read in reads]
    run = partial(
        run_jobs, threads=threads, progress=progress or silent, patience=patience or Patience()
    )
    spent = run(jobs, phase="load")
    clock.lap("load")
    digest = ""
    if check:
        digest = _digest_parameters(parameters, targets, run)
        clock.lap("digest")
    return LoadReport(sum(r.num_bytes for r in reads), clock.seconds, spent, digest)


class _Clock:
    """Cuts wall time into phases without gaps."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def check_parameters(
    parameters: Mapping[str, torch.Tensor], spec: WeightSpec, place: Place
) -> None:
    """Raises TensorError listing every parameter that is absent, unknown, or of another shape.

    A tied alias may be given only if it shares its memory with its twin.
    """
    wanted = parameter_shapes(spec, place)
    optional = {rule.name for rule in spec.tensors if rule.optional}
    tied = dict(spec.family.table.tied) if "tied" in spec.facts.flags else {}
    wrong = [f"{n}: not allocated" for n in wanted if n not in parameters and n not in optional]
    for name, tensor in parameters.items():
        twin = parameters.get(tied.get(name, ""))
        if name in wanted:
            if tuple(tensor.shape) != wanted[name]:
                wrong.append(f"{name}: allocated {list(tensor.shape)}, needs {list(wanted[name])}")
            elif not tensor.is_floating_point():
                wrong.append(f"{name}: allocated as {tensor.dtype}, needs a floating point type")
        elif twin is None or twin.data_ptr() != tensor.data_ptr():
            wrong.append(f"{name}: no rule of the family fills it")
    if wrong:
        raise TensorError("parameters do not fit the model:\n  " + "\n  ".join(wrong))


def zero_what_is_not_read(
    parameters: Mapping[str, torch.Tensor], targets: Sequence[Target]
) -> None:
    """Zeroes padding rows, and tensors that only the first rank of a sum holds."""
    for target in targets:
        if target.name not in parameters:
            continue
        tensor, part = destination(parameters, target), target.part
        if part.zero:
            tensor.zero_()
        elif part.padded:
            tensor.narrow(part.dim, part.stop - part.start, part.padded).zero_()


def destination(parameters: Mapping[str, torch.Tensor], target: Target) -> torch.Tensor:
    """Returns the memory one tensor rule fills: a parameter, or one expert of a stacked one."""
    tensor = parameters[target.name].detach()
    return tensor if target.stacked is None else tensor[target.stacked]


def _tensor_job(
    parameters: Mapping[str, torch.Tensor], source: Checkpoint, read: TensorRead
) -> Job:
    run = partial(_fill_from_tensor, destination(parameters, read.target), source, read)
    return Job(read.target.rule.unit, read.file, read.offset, read.num_bytes, run)


def _fill_from_tensor(
    tensor: torch.Tensor, source: Checkpoint, read: TensorRead, worker: Worker
) -> None:
    info, part = source.tensors[read.source], read.target.part
    count = read.stop - read.start
    rows = tensor.narrow(0, read.at, count) if tensor.dim() else tensor
    if part.dim:
        rows = rows.narrow(part.dim, 0, part.stop - part.start)
    started = perf_counter()
    same = TORCH_TYPES[info.dtype] == tensor.dtype and rows.device.type == "cpu"
    if info.in_place and same and rows.is_contiguous():
        source.read_into(read.source, read.start, bytes_of(rows))
        worker.spend("read", started)
        return
    if info.in_place:
        staged = worker.staging(read.num_bytes)
        source.read_into(read.source, read.start, staged)
        values = torch.frombuffer(staged, dtype=TORCH_TYPES[info.dtype])
        values = values.view(count, *info.shape[1:]) if info.shape else values.view(())
    else:
        values = as_tensor(source.read(read.source, slice(read.start, read.stop)), info.dtype)
    started = worker.spend("read", started)
    if part.dim:
        values = values.narrow(part.dim, part.start, part.stop - part.start)
    rows.copy_(values)
    worker.spend("place", started)


def _digest_parameters(
    parameters: Mapping[str, torch.Tensor],
    targets: Sequence[Target],
    run: "partial[dict[str, float]]",
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
