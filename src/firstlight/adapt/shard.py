"""Owns the conversion of a checkpoint into a store: what, in which order, and how it resumes.

Knows no device and no layout; one store serves them all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from blake3 import blake3

from firstlight.adapt.precision import PrecisionMeter
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
from firstlight.checkpoint.positioned_io import explained, write_whole
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import Manifest, PrecisionRecord, read_manifest
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    UnitRecord,
    payload_bytes,
)
from firstlight.checkpoint.store_names import (
    ANSWERS_FOLDER,
    COMPLETE_NAME,
    MODEL_FOLDER,
    PARTIAL_FOLDER,
    is_store,
)
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
    """`dtype` is a codec name. `export_tokenizer(gguf, folder)` writes the tokenizer of a GGUF
    source. A `budget` above 0 keeps the layers that quantising hurts most, measured on the token
    ids of `samples`: it is the share of the saved bytes that may be given up for them."""

    dtype: str = "keep"
    budget: float = 0.0
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
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
        finished = _finished_store(target, plan, _budget(options))
        if finished is not None:
            return ShardReport(target, finished, len(finished.units), already_complete=True)
        refuse_errors(prove_tied(checkpoint, plan.report), str(source))
        if _budget(options):
            precision = _choose_precision(checkpoint, target, plan, options)
            plan = plan_shard(checkpoint, dtype=options.dtype, precision=precision)
        return _write_store(checkpoint, target, plan, options)
    finally:
        published.close()


def _budget(options: ShardOptions) -> float:
    """Returns the budget for layers at higher precision, 0 where nothing is quantised.

    Raises UsageError for a budget that is no share, or one without sample tokens.
    """
    if not 0 <= options.budget <= 1:
        raise UsageError(f"a precision budget of {options.budget} is not between 0 and 1")
    if options.budget and not any(options.samples.values()):
        raise UsageError("a precision budget needs sample text to measure with")
    return options.budget if find_codec(options.dtype).quantised else 0.0


def _choose_precision(
    checkpoint: Checkpoint, target: Path, plan: ShardPlan, options: ShardOptions
) -> PrecisionRecord:
    """Measures every layer, or returns what an interrupted run with the same wishes measured."""
    asked = {**plan.request, "budget": str(options.budget), "samples": str(options.samples)}
    notes = target / PARTIAL_FOLDER / _PRECISION_NAME
    if notes.is_file():
        known = msgspec.json.decode(notes.read_bytes(), type=_Measured)
        if known.asked == asked:
            return known.record
    meter = PrecisionMeter(plan.spec, find_codec(options.dtype), options.samples)
    exact = plan_shard(checkpoint)
    total = sum(payload_bytes(unit) for unit in exact.units)
    run = _Run(checkpoint, replace(options, hook=meter), total, phase="measure")
    for unit in exact.units:
        if unit.name == "embed" or unit.name.startswith("layer-"):
            _pass_unit(run, unit, None)
    record = meter.choose(options.budget)
    with explained(notes, 0, "create"):
        notes.parent.mkdir(parents=True, exist_ok=True)
    write_whole(notes, msgspec.json.encode(_Measured(asked, record)))
    return record


class _Measured(msgspec.Struct):
    """What was measured, and for which wishes."""

    asked: dict[str, str]
    record: PrecisionRecord


_PRECISION_NAME = "precision.json"


def _finished_store(target: Path, plan: ShardPlan, budget: float) -> Manifest | None:
    """Returns the manifest when `target` is already this store. Raises StoreError for another."""
    if not (target / COMPLETE_NAME).exists():
        if target.is_dir() and any(target.iterdir()) and not is_store(target):
            raise StoreError(f"{target}: is neither empty nor a store begun here; choose another")
        return None
    manifest = read_manifest(target)
    spent = manifest.precision.budget if manifest.precision else 0.0
    same = (manifest.source.headers_digest, manifest.codec, spent) == (
        plan.request["source"],
        plan.request["codec"],
        budget,
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
    phase: str = "shard"
    records: list[UnitRecord] = field(default_factory=list)

    def advance(self, num_bytes: int, unit: str) -> None:
        self.done += num_bytes
        self.options.progress(self.phase, self.done, self.total, unit)


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
