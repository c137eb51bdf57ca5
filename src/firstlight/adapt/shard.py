"""Owns the conversion of a checkpoint into a store: what, in which order, and how it resumes.

Knows no device and no layout; one store serves them all.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3

from firstlight.adapt.shard_files import (
    TokenizerExport,
    copy_model_files,
    digest_files,
)
from firstlight.adapt.shard_plan import UNUSED_UNIT, ShardPlan, make_manifest, plan_shard
from firstlight.adapt.shard_tiles import Tile, granule_rows, read_tile, stored_values, tiles_of
from firstlight.checkpoint.dequantised import dequantised
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.names import prove_tied
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import Manifest, read_manifest
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    UnitRecord,
    payload_bytes,
)
from firstlight.checkpoint.store_names import ANSWERS_FOLDER, MODEL_FOLDER, is_store
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.checkpoint.writer import StoreWriter, UnitWriter, forget_notes
from firstlight.errors import StoreError, UsageError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.codecs import find_codec


class UnitHook(Protocol):
    """Sees every unit's tensors as they pass, in load order, in the store's element types."""

    def on_unit(self, unit: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes one unit: whole tensors by our names, experts stacked where they share a name."""
        ...

    def finish(self, store: Path) -> None:
        """Writes what it learned into the store's `answers` folder; called before COMPLETE."""
        ...


@dataclass(frozen=True)
class ShardReport:
    """What a conversion did. `resumed_units` were finished by an earlier run; `free_bytes` were
    free when it began, `needed_bytes` still to be written then. `already_complete`: nothing to do.
    """

    path: Path
    manifest: Manifest
    resumed_units: int = 0
    needed_bytes: int = 0
    free_bytes: int = 0
    already_complete: bool = False


@dataclass(frozen=True)
class ShardOptions:
    """`dtype` is a codec name (keep, fp32, bf16, fp16). `export_tokenizer(gguf, folder)` writes
    the tokenizer of a GGUF source."""

    dtype: str = "keep"
    hook: UnitHook | None = None
    export_tokenizer: TokenizerExport | None = None
    progress: Progress = silent


def shard(source: Path, target: Path, options: ShardOptions | None = None) -> ShardReport:
    """Converts a checkpoint into a store at `target`, or finishes one begun there.

    The source is only read. Raises BadInput kinds before the first byte is written,
    EnvironmentProblem with numbers when the disk is too small; finished units are kept.
    """
    options = options or ShardOptions()
    if target.resolve() == source.resolve():
        raise UsageError(f"{target}: source and store must be different places")
    published = open_checkpoint(source)
    try:
        checkpoint = dequantised(published, read_model_spec(published.config()))
        refuse_errors(checkpoint.findings, str(source))
        plan = plan_shard(checkpoint, dtype=options.dtype)
        finished = _finished_store(target, plan)
        if finished is not None:
            return ShardReport(target, finished, len(finished.units), already_complete=True)
        refuse_errors(prove_tied(checkpoint, plan.report), str(source))
        return _write_store(checkpoint, target, plan, options)
    finally:
        published.close()


def _finished_store(target: Path, plan: ShardPlan) -> Manifest | None:
    """Returns the manifest when `target` is already this store. Raises StoreError for another."""
    if not (target / "COMPLETE").exists():
        if target.is_dir() and any(target.iterdir()) and not is_store(target):
            raise StoreError(f"{target}: is neither empty nor a store begun here; choose another")
        return None
    manifest = read_manifest(target)
    same = (manifest.source.headers_digest, manifest.codec) == (
        plan.request["source"],
        plan.request["codec"],
    )
    if not same:
        raise StoreError(
            f"{target}: already holds a store made from {manifest.source.name} with dtype "
            f"{manifest.codec}; remove it or choose another directory"
        )
    forget_notes(target)
    return manifest


ByteSink = Callable[[memoryview], object]


@dataclass
class _Run:
    """What one conversion carries along."""

    checkpoint: Checkpoint
    options: ShardOptions
    total: int
    done: int = 0
    records: list[UnitRecord] = field(default_factory=list)

    def advance(self, num_bytes: int, unit: str) -> None:
        self.done += num_bytes
        self.options.progress("shard", self.done, self.total, unit)


def _write_store(
    checkpoint: Checkpoint, target: Path, plan: ShardPlan, options: ShardOptions
) -> ShardReport:
    writer = StoreWriter(target, dict(plan.request))
    needed, free = writer.check_space(list(plan.units))
    run = _Run(checkpoint, options, sum(payload_bytes(unit) for unit in plan.units))
    resumed = 0
    for unit in plan.units:
        record = writer.finished(unit)
        if record is None:
            record = _write_unit(run, writer, unit)
        else:
            resumed += 1
            if options.hook is not None and unit.name != UNUSED_UNIT:
                _pass_unit(run, unit, None)
            else:
                run.advance(payload_bytes(unit), unit.name)
        run.records.append(record)
    files = copy_model_files(checkpoint, target / MODEL_FOLDER, options.export_tokenizer)
    if options.hook is not None:
        options.hook.finish(target)
    manifest = make_manifest(
        checkpoint,
        plan,
        units=run.records,
        files=files,
        answers=digest_files(target / ANSWERS_FOLDER),
    )
    writer.complete(manifest)
    return ShardReport(target, manifest, resumed, needed, free)


def _write_unit(run: _Run, writer: StoreWriter, unit: UnitRecord) -> UnitRecord:
    output = writer.begin(unit)
    try:
        digest = _pass_unit(run, unit, output)
        record = output.finish(digest)
    except BaseException:
        output.abandon()
        raise
    writer.remember(record)
    return record


def _pass_unit(run: _Run, unit: UnitRecord, output: UnitWriter | None) -> str:
    """Reads a unit's tensors once: into the store, into the digest returned, and to the hook."""
    hasher = blake3()
    hook = run.options.hook if unit.name != UNUSED_UNIT else None
    held: dict[str, list[torch.Tensor]] = {}
    stacked: set[str] = set()
    for index, block in enumerate(unit.blocks):
        for expert, number in product(range(block.count), range(len(block.parts))):
            part, tiles = block.parts[number], []
            for tile, values in _read_part(run, block, number, expert, hasher.update):
                rows = granule_rows(block, part, tile, values)
                if output is not None:
                    key = GranuleKey(index, expert, tile.granule)
                    output.write(key, part=number, first_byte=tile.first_byte, rows=rows)
                run.advance(rows.nbytes, unit.name)
                if hook is not None and not part.unused:
                    coded = find_codec(part.codec).quantised
                    tiles.append(stored_values(block, part, rows) if coded else values)
            if tiles:
                name = _own_name(block, number, expert)
                held.setdefault(name, []).append(torch.cat(tiles).view(part.shape))
                if block.experts and name == part.name:
                    stacked.add(name)
    if hook is not None:
        whole = {n: torch.stack(t) if n in stacked else t[0] for n, t in held.items()}
        hook.on_unit(unit.name, whole)
    return hasher.hexdigest()


def _read_part(
    run: _Run,
    block: BlockRecord,
    number: int,
    expert: int,
    on_bytes: ByteSink,
) -> Iterator[tuple[Tile, torch.Tensor]]:
    part = block.parts[number]
    for tile in tiles_of(block, part):
        source = part.sources[expert]
        yield tile, read_tile(run.checkpoint, part, tile, source=source, on_bytes=on_bytes)


def _own_name(block: BlockRecord, number: int, expert: int) -> str:
    name = block.parts[number].name
    return name.replace("*", str(block.experts[expert])) if block.experts else name
