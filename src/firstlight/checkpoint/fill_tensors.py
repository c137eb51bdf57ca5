"""Owns how values reach parameters straight from a checkpoint; plans nothing and checks no name."""

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter

import torch

from firstlight.checkpoint.executor import Job, Worker
from firstlight.checkpoint.read_plan import Target, TensorRead
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.checkpoint.torch_types import TORCH_TYPES, as_tensor, bytes_of, copy_values


def zero_what_is_not_read(
    parameters: Mapping[str, torch.Tensor], targets: Sequence[Target]
) -> None:
    """Zeroes padding rows, and tensors that only the first rank of a sum holds."""
    for target in targets:
        part = target.part
        if target.name not in parameters or not (part.zero or part.padded):
            continue
        tensor = destination(parameters, target)
        if part.zero:
            tensor.zero_()
        else:
            tensor.narrow(part.dim, part.stop - part.start, part.padded).zero_()


def destination(parameters: Mapping[str, torch.Tensor], target: Target) -> torch.Tensor:
    """Returns the memory one tensor rule fills: a parameter, or one expert of a stacked one."""
    tensor = parameters[target.name].detach()
    return tensor if target.stacked is None else tensor[target.stacked]


def tensor_job(parameters: Mapping[str, torch.Tensor], source: Checkpoint, read: TensorRead) -> Job:
    """Returns the job that makes one read and puts it in place, its element type converted."""
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
    if info.in_place and same and not part.dim and rows.is_contiguous():
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
    copy_values(rows, values)
    worker.spend("place", started)
