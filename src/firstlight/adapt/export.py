"""Owns the way back: a store becomes safetensors files again, bit for bit where nothing was cast.

Knows no layout; what the store holds is what is written.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from firstlight.adapt.shard_files import copy_stored_files
from firstlight.checkpoint.codec_values import decode_matrix, float32_to
from firstlight.checkpoint.digests import granule_digest
from firstlight.checkpoint.positioned_io import (
    InputFile,
    OutputFile,
    explained,
    free_bytes,
    refuse_occupied,
    sync_directory,
    write_whole,
)
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.reader import INDEX_NAME
from firstlight.checkpoint.safetensors_header import OutputTensor, encode_header, place_tensors
from firstlight.checkpoint.store import Store, open_store
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    UnitRecord,
    block_offsets,
    describe_granule,
    first_entries,
    granule_bytes,
    granule_parts,
    stride,
)
from firstlight.checkpoint.tensor_info import Array
from firstlight.errors import DigestMismatch, EnvironmentProblem
from firstlight.sharding.codecs import dtype_bytes, find_codec
from firstlight.units import format_bytes


@dataclass(frozen=True)
class ExportReport:
    """What was written: files, tensors, bytes; `cast` lists types that are not the source's."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    num_bytes: int
    cast: tuple[str, ...]


def export_store(path: Path, target: Path, *, progress: Progress = silent) -> ExportReport:
    """Writes a store's weights, config and tokenizer as a Hugging Face folder, one file a unit.

    Digests are checked on the way. Raises StoreError for a target that is not empty,
    DigestMismatch for damage, EnvironmentProblem when the disk is too small.
    """
    store = open_store(path)
    refuse_occupied(target)
    with explained(target, 0, "create"):
        target.mkdir(parents=True, exist_ok=True)
    planned = {unit.name: _plan_file(store, unit) for unit in store.manifest.units}
    total = sum(t.num_bytes for tensors in planned.values() for t in tensors)
    if total > free_bytes(target):
        raise EnvironmentProblem(
            f"{target}: the export needs {format_bytes(total)}, "
            f"{format_bytes(free_bytes(target))} are free there"
        )
    weight_map: dict[str, str] = {}
    done = 0
    for number, unit in enumerate(store.manifest.units, 1):
        name = f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        _write_file(store, unit, target / name, planned[unit.name])
        weight_map.update({t.name: name for t in planned[unit.name]})
        done += sum(t.num_bytes for t in planned[unit.name])
        progress("export", done, total, unit.name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    copy_stored_files(store, target)
    write_whole(target / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
    sync_directory(target)
    cast = {
        f"{p.source_dtype} -> {p.codec if find_codec(p.codec).quantised else p.dtype}"
        for u in store.manifest.units
        for b in u.blocks
        for p in b.parts
        if p.dtype != p.source_dtype or find_codec(p.codec).quantised
    }
    return ExportReport(
        target, tuple(sorted(set(weight_map.values()))), len(weight_map), total, tuple(sorted(cast))
    )


def _plan_file(store: Store, unit: UnitRecord) -> list[OutputTensor]:
    """Lists the source tensors of a unit; pieces of a fused one make it whole again."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for block in unit.blocks:
        for part, expert in product(block.parts, range(block.count)):
            source, shape = part.sources[expert], part.shape
            if part.source_rows is not None:
                known = shapes.get(source, ("", (0,)))[1][0]
                shape = (max(known, part.source_rows[1]), *shape[1:])
            shapes[source] = (part.dtype, shape)
    for tied in store.manifest.tied:
        if tied.same_as in shapes:
            shapes[tied.source] = shapes[tied.same_as]
    return place_tensors((name, dtype, shape) for name, (dtype, shape) in shapes.items())


def _write_file(store: Store, unit: UnitRecord, path: Path, tensors: list[OutputTensor]) -> None:
    header = encode_header(tensors)
    places = {t.name: t for t in tensors}
    twins: dict[str, list[str]] = {}
    for tied in store.manifest.tied:
        twins.setdefault(tied.same_as, []).append(tied.source)
    file = InputFile(store.bin_path(unit.name))
    output = OutputFile(path, len(header) + sum(t.num_bytes for t in tensors))
    try:
        output.write(memoryview(header), 0)
        for run in _runs(store, unit, file):
            for source in (run.source, *twins.get(run.source, ())):
                output.write(run.values.data, len(header) + places[source].offset + run.offset)
        output.sync()
    finally:
        output.close()
        file.close()


class _Run(NamedTuple):
    """Bytes of one source tensor, and where in it they stand."""

    source: str
    offset: int
    values: Array


def _runs(store: Store, unit: UnitRecord, file: InputFile) -> Iterator[_Run]:
    """Yields every byte of a unit's tensors once, one part of one expert in memory at a time."""
    entries, firsts, offsets = store.entries(unit.name), first_entries(unit), block_offsets(unit)
    for index, block in enumerate(unit.blocks):
        for expert in range(block.count):
            granules = []
            for granule in range(block.granules):
                key = GranuleKey(index, expert, granule)
                row = expert * block.granules + granule
                num_bytes = granule_bytes(block, granule)
                data = file.read(offsets[index] + row * stride(block), num_bytes)
                found = granule_digest(memoryview(data), unit.name, key)
                if found != entries["digest"][firsts[index] + row].tobytes():
                    where = describe_granule(unit, key)
                    raise DigestMismatch(f"{file.path}: {where} differs from its digest")
                granules.append(np.frombuffer(data, np.uint8))
            yield from _whole_parts(block, expert, granules)


def _whole_parts(block: BlockRecord, expert: int, granules: list[Array]) -> Iterator[_Run]:
    for number, part in enumerate(block.parts):
        width, codec = dtype_bytes(part.dtype), find_codec(part.codec)
        slabs = []
        for granule, data in enumerate(granules):
            place = granule_parts(block, granule)[number]
            run = data[place.offset : place.offset + place.num_bytes]
            if codec.quantised:
                run = float32_to(decode_matrix(codec, run, place.shape), part.dtype).view(np.uint8)
            slabs.append(run.reshape(*(place.shape or (1,)), width))
        whole = np.ascontiguousarray(np.concatenate(slabs, axis=part.dim))
        first = part.source_rows[0] if part.source_rows else 0
        row_bytes = prod(part.shape[1:]) * width
        yield _Run(part.sources[expert], first * row_bytes, whole.reshape(-1))
