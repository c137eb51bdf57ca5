"""How fast are weights loaded, as a share of what the machine can read?

Loads one real model whole onto the CPU, in turns: straight from its safetensors, from its store,
each with and without digests, and with safetensors' own load_file (followed by a copy, since that
maps the file and reads nothing by itself), runai-model-streamer and fastsafetensors where they are
installed (each tensor copied out of their buffer, as a model needs it). The limit is what bare
preadv reaches on the same bytes with the same threads. Files are in the page cache unless --cold is
given: then their pages are dropped before each load, and those of no other file.

    python benchmarks/loading.py MODEL_FOLDER [--threads 2] [--rounds 5] [--cold]
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load_file

from firstlight.adapt.shard import shard
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.read_plan import parameter_shapes
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import Store, open_store
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.sharding.layout import Layout
from firstlight.units import format_bytes, format_rate, format_seconds

CHUNK = 8 * 2**20


def read_bare(paths: list[Path], threads: int) -> None:
    """Reads every byte of some files into one buffer a thread: the limit of any loader."""
    jobs = [(path, at) for path in paths for at in range(0, path.stat().st_size, CHUNK)]

    def work(own: list[tuple[Path, int]]) -> None:
        buffer, files = memoryview(bytearray(CHUNK)), {}
        for path, at in own:
            if path not in files:
                files[path] = os.open(path, os.O_RDONLY)
            os.preadv(files[path], [buffer], at)
        for descriptor in files.values():
            os.close(descriptor)

    workers = [threading.Thread(target=work, args=(jobs[n::threads],)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def allocate(spec: ModelSpec) -> dict[str, torch.Tensor]:
    shapes = parameter_shapes(spec, Layout().place(0))
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def drop_pages(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def streamed(paths: list[Path]) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in paths])
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def fast(paths: list[Path]) -> object:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    try:
        loader.add_filenames({0: [str(path) for path in paths]})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name).clone() for name in loader.get_keys()}
    finally:
        loader.close()


def candidates(
    model: Path, store: Store, checkpoint: Checkpoint, threads: int
) -> dict[str, Callable[[], object]]:
    spec = read_model_spec(checkpoint.config())
    place = Layout().place(0)

    def ours(source: Store | Checkpoint, check: bool) -> Callable[[], object]:
        return lambda: load_into(allocate(spec), source, spec, place, threads=threads, check=check)

    def theirs() -> object:
        tensors = [load_file(path) for path in checkpoint.files]
        return [{name: value.clone() for name, value in file.items()} for file in tensors]

    bins = [store.bin_path(unit.name) for unit in store.manifest.units]
    others: dict[str, Callable[[], object]] = {"safetensors load_file and copy": theirs}
    for module, load in (("runai_model_streamer", streamed), ("fastsafetensors", fast)):
        if importlib.util.find_spec(module) is not None:
            others[module] = lambda load=load: load(list(checkpoint.files))
    return {
        "bare preadv (the limit)": lambda: read_bare(bins, threads),
        "store, digests checked": ours(store, True),
        "store, unchecked": ours(store, False),
        "safetensors by firstlight, digest taken": ours(checkpoint, True),
        "safetensors by firstlight, unchecked": ours(checkpoint, False),
        **others,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = open_checkpoint(arguments.model)
    num_bytes = sum(info.num_bytes for info in checkpoint.tensors.values())
    with tempfile.TemporaryDirectory(dir=arguments.model.parent) as folder:
        shard(arguments.model, Path(folder) / "store")
        store = open_store(Path(folder) / "store")
        files = [store.bin_path(unit.name) for unit in store.manifest.units]
        files += checkpoint.files
        named = candidates(arguments.model, store, checkpoint, arguments.threads)
        seconds: dict[str, list[float]] = {name: [] for name in named}
        for _ in range(arguments.rounds + 1):  # in turns, so that a busy machine slows all alike
            for name, run in named.items():
                if arguments.cold:
                    drop_pages(files)
                started = perf_counter()
                run()
                seconds[name].append(perf_counter() - started)
    report(seconds, num_bytes, arguments.threads)


def report(seconds: dict[str, list[float]], num_bytes: int, threads: int) -> None:
    """Prints medians and bests of all rounds but the first, which warms up."""
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    limit, peer = medians[next(iter(medians))], medians["safetensors load_file and copy"]
    print(f"{format_bytes(num_bytes)}, {threads} threads, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':42}{'median':>9}{'best':>9}{'rate':>13}{'of limit':>10}{'vs load_file':>14}")
    for name, median in medians.items():
        print(
            f"{name:42}{format_seconds(median):>9}{format_seconds(min(seconds[name][1:])):>9}"
            f"{format_rate(num_bytes, median):>13}{limit / median:>10.0%}{peer / median:>13.2f}x"
        )
    print(json.dumps({name: [round(t, 4) for t in times] for name, times in seconds.items()}))


if __name__ == "__main__":
    main()
