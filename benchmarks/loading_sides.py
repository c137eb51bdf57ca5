"""The sides of `loading.py`: ways to bring the same weights into memory, and what bounds them.

Owns each way as one call without arguments; refuses to know rounds, ratios and pages. What a call
returns is what a model would keep; it is dropped by the caller, outside the measured time.
"""

import ctypes
import importlib.util
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from safetensors.torch import load_file

from firstlight.checkpoint.loader import LoadReport, load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes
from firstlight.checkpoint.store import Store
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.models.spec import ModelSpec
from firstlight.sharding.layout import Layout, Place

CHUNK = 4 * 2**20
Side = Callable[[], object]


def in_threads(threads: int, jobs: Sequence[tuple[object, ...]], work: Callable[..., None]) -> None:
    """Runs `work(*job)` for every job, job by job on the next free thread."""
    left, lock = iter(jobs), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                job = next(left, None)
            if job is None:
                return
            work(*job)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def plain_read(paths: Sequence[Path], threads: int, *, direct: bool) -> None:
    """Reads every byte of some files and keeps none: the limit of any loader."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = [os.open(path, flags) for path in paths]
    buffers = threading.local()

    def read(descriptor: int, at: int) -> None:
        if not hasattr(buffers, "pages"):
            pages = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
            buffers.pages = memoryview(pages)
        os.preadv(descriptor, [buffers.pages], at)

    jobs = [(f, at) for f in files for at in range(0, os.fstat(f).st_size, CHUNK)]
    in_threads(threads, jobs, read)
    for descriptor in files:
        os.close(descriptor)


def copy_bytes(paths: Sequence[Path], threads: int) -> object:
    """Reads every byte of some files into new memory: the least a warm load does."""
    files = [os.open(path, os.O_RDONLY) for path in paths]
    tensors = [torch.empty(os.fstat(f).st_size, dtype=torch.uint8) for f in files]
    kept = [memoryview(tensor.numpy()) for tensor in tensors]

    def read(number: int, at: int) -> None:
        os.preadv(files[number], [kept[number][at : at + CHUNK]], at)

    jobs = [(n, at) for n, data in enumerate(kept) for at in range(0, len(data), CHUNK)]
    in_threads(threads, jobs, read)
    for descriptor in files:
        os.close(descriptor)
    return kept


def hash_bytes(num_bytes: int, threads: int) -> None:
    """Hashes so many bytes of memory, in pieces of the size that digests have."""
    data = memoryview(np.ones(64 * 2**20, np.uint8))
    piece = 2**18

    def digest(at: int) -> None:
        blake3(data[at : at + piece]).digest()

    in_threads(threads, [(at % len(data),) for at in range(0, num_bytes, piece)], digest)


def allocate(spec: ModelSpec, place: Place) -> dict[str, torch.Tensor]:
    """Returns new memory for a rank's parameters in bf16."""
    kept = kept_types(spec)
    return {
        name: torch.empty(shape, dtype=TORCH_TYPES[kept.get(name, "BF16")])
        for name, shape in parameter_shapes(spec, place).items()
    }


def load_store(store: Store, spec: ModelSpec, *, check: bool) -> tuple[object, LoadReport]:
    """Loads a whole model as a service would."""
    place = Layout().place(0)
    parameters = allocate(spec, place)
    return parameters, load_into(parameters, store, spec, place, check=check)


def load_file_and_copy(paths: Sequence[Path]) -> object:
    """safetensors' own: it maps the files, so that values are read when they are copied."""
    return {n: t.clone() for path in paths for n, t in load_file(path).items()}


class Kept(NamedTuple):
    """Tensors in memory that a loader owns, and what gives it back."""

    values: dict[str, torch.Tensor]
    close: Callable[[], object]


def streamed(paths: Sequence[Path]) -> Kept:
    """runai-model-streamer; its tensors are kept where it put them."""
    from runai_model_streamer import SafetensorsStreamer

    streamer = SafetensorsStreamer().__enter__()
    streamer.stream_files([str(path) for path in paths])
    return Kept(dict(streamer.get_tensors()), lambda: streamer.__exit__(None, None, None))


def fast(paths: Sequence[Path]) -> Kept:
    """fastsafetensors on its CPU path; its tensors are kept where it put them."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: [str(path) for path in paths]})
    buffers = loader.copy_files_to_device()

    def close() -> None:
        buffers.close()
        loader.close()

    return Kept({name: buffers.get_tensor(name) for name in loader.get_keys()}, close)


def peers(paths: Sequence[Path]) -> dict[str, Side]:
    """Returns the loaders of others that are installed."""
    found: dict[str, Side] = {"safetensors load_file, copied": lambda: load_file_and_copy(paths)}
    if importlib.util.find_spec("runai_model_streamer") is not None:
        found["runai-model-streamer"] = lambda: streamed(paths)
    if importlib.util.find_spec("fastsafetensors") is not None:
        found["fastsafetensors"] = lambda: fast(paths)
    return found


def drop_pages(paths: Sequence[Path]) -> None:
    """Takes the pages of some files, and of no other, out of the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached_share(paths: Sequence[Path]) -> float:
    """Returns which share of some files' pages is in the page cache, asked of mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = pages = 0
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as area:
            view = np.frombuffer(area, np.uint8)
            count = -(-size // mmap.PAGESIZE)
            states = np.zeros(count, np.uint8)
            address = ctypes.c_void_p(view.ctypes.data)
            if libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore")
            held += int((states & 1).sum())
            pages += count
            del view
    return held / pages
