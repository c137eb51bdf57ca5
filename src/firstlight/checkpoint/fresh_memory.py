"""Owns asking the system for the memory of parameters before threads fill it.

Refuses to know what is read into it. All of it is advice: where a system has none of this, memory
comes page by page as it is first written. No huge pages are asked for: a virtual machine that hands
free memory back to its host can wait far longer for those.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch

from firstlight.checkpoint.executor import Job, Worker
from firstlight.checkpoint.fill_tensors import destination
from firstlight.checkpoint.granule_plan import GranuleRead

_SMALLEST = 2 * 2**20  # below this a job more costs what it saves
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14, which the mmap module does not name
_AHEAD = 16  # reads between the job that takes memory and the first that fills it

Advise = Callable[[int, int, int], object]


def with_memory_ahead(
    parameters: Mapping[str, torch.Tensor], reads: Sequence[GranuleRead], jobs: Sequence[Job]
) -> list[Job]:
    """Returns the jobs of reads, with a job before them for every tensor many of them write across.

    Parts cut along another dim than the first touch all pages of their tensor in every read:
    threads would fault on the same pages at once, and each would clear a page that one can use.
    """
    advise = _advise()
    before: dict[int, list[Job]] = {}
    seen: set[tuple[str, int | None]] = set()
    for number, (read, job) in enumerate(zip(reads, jobs, strict=True)):
        for tensor in _written_across(parameters, read, seen):
            if advise is not None:
                run = partial(_take, tensor, advise)
                taking = Job(job.unit, job.file, job.offset, 0, run)
                before.setdefault(max(0, number - _AHEAD), []).append(taking)
    return [each for n, job in enumerate(jobs) for each in (*before.get(n, ()), job)]


def _written_across(
    parameters: Mapping[str, torch.Tensor],
    read: GranuleRead,
    seen: set[tuple[str, int | None]],
) -> Iterator[torch.Tensor]:
    """Yields the large tensors that a read, the first of several, writes to in all their pages."""
    for target in read.targets:
        if target is None or not target.part.dim or (target.name, target.stacked) in seen:
            continue
        seen.add((target.name, target.stacked))
        tensor = destination(parameters, target)
        first, stop = _addresses(tensor)
        if stop - first >= _SMALLEST:
            yield tensor


def _take(tensor: torch.Tensor, advise: Advise, worker: Worker) -> None:
    started = perf_counter()
    first, stop = _addresses(tensor)
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    advise(start, stop // mmap.PAGESIZE * mmap.PAGESIZE - start, _POPULATE_WRITE)
    worker.spend("memory", started)


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns where a tensor's bytes begin and end; nothing for one elsewhere or in pieces."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0, 0
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()


def _advise() -> Advise | None:
    """Returns madvise(address, bytes, advice), whose refusals are no errors; None without it."""
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is None:
        return None
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    found: Advise = call
    return found
