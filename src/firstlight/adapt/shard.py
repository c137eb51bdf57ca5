"""Owns the conversion of a checkpoint into a store: what, in which order, and how it resumes.

Knows no device and no layout; one store serves them all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from firstlight.adapt.precision import PrecisionMeter
from firstlight.adapt.shard_files import (
    TokenizerExport,
    copy_model_files,
)
from firstlight.adapt.shard_pass import UnitPasses
from firstlight.adapt.shard_plan import ShardPlan, make_manifest, plan_shard
from firstlight.checkpoint.dequantised import dequantised
from firstlight.checkpoint.findings import refuse_errors
from firstlight.checkpoint.names import prove_tied
from firstlight.checkpoint.positioned_io import write_whole
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.checkpoint.store import Manifest, PrecisionRecord, digest_files, read_manifest
from firstlight.checkpoint.store_layout import UnitRecord, payload_bytes
from firstlight.checkpoint.store_names import (
    ANSWERS_FOLDER,
    COMPLETE_NAME,
    MODEL_FOLDER,
    PARTIAL_FOLDER,
    is_store,
)
from firstlight.checkpoint.tensor_info import Checkpoint
from firstlight.checkpoint.writer import StoreWriter, forget_notes, sole_writer
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
    ids of `samples`: it is the share of the saved bytes that may be given up for them. `threads`
    units are converted at the same time, 0 is as many as help."""

    dtype: str = "keep"
    budget: float = 0.0
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
    hook: UnitHook | None = None
    threads: int = 0
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
        with sole_writer(target) as writer:
            finished = _finished_store(target, plan, _budget(options))
            if finished is not None:  # by another run, since the first look
                return ShardReport(target, finished, len(finished.units), already_complete=True)
            if _budget(options):
                precision = _choose_precision(checkpoint, target, plan, options)
                plan = plan_shard(checkpoint, dtype=options.dtype, precision=precision)
            return _write_store(checkpoint, writer, plan, options)
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
    units = [
        unit
        for unit in plan_shard(checkpoint).units
        if unit.name == "embed" or unit.name.startswith("layer-")
    ]
    counted = _Counted(options.progress, "measure", units)
    passes = UnitPasses(checkpoint, counted, on_unit=meter.on_unit, threads=options.threads)

    def measure(number: int, unit: UnitRecord) -> UnitRecord:
        passes.read(number, unit, None)
        return unit

    passes.run(units, measure)
    record = meter.choose(options.budget)
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


class _Counted:
    """Tells a progress callback how far all units are."""

    def __init__(self, progress: Progress, phase: str, units: Iterable[UnitRecord]) -> None:
        self._progress, self._phase = progress, phase
        self._done, self._total = 0, sum(payload_bytes(unit) for unit in units)

    def __call__(self, num_bytes: int, unit: str) -> None:
        self._done += num_bytes
        self._progress(self._phase, self._done, self._total, unit)


def _write_store(
    checkpoint: Checkpoint, writer: StoreWriter, plan: ShardPlan, options: ShardOptions
) -> ShardReport:
    writer.claim(dict(plan.request))
    target, hook = writer.path, options.hook
    needed, free = writer.check_space(list(plan.units))
    finished = {unit.name: writer.finished(unit) for unit in plan.units}
    passes = UnitPasses(
        checkpoint,
        _Counted(options.progress, "shard", plan.units),
        on_unit=hook.on_unit if hook is not None else None,
        threads=options.threads,
    )

    def convert(number: int, unit: UnitRecord) -> UnitRecord:
        record = finished[unit.name]
        if record is None:
            return _write_unit(passes, writer, number, unit)
        if hook is not None:
            passes.read(number, unit, None)
        else:
            passes.skip(number, unit)
        return record

    records = passes.run(plan.units, convert)
    files = copy_model_files(checkpoint, target / MODEL_FOLDER, options.export_tokenizer)
    if hook is not None:
        hook.finish(target)
    manifest = make_manifest(
        checkpoint,
        plan,
        units=records,
        files=files,
        answers=digest_files(target / ANSWERS_FOLDER),
    )
    writer.complete(manifest)
    resumed = sum(record is not None for record in finished.values())
    return ShardReport(target, manifest, resumed, needed, free)


def _write_unit(
    passes: UnitPasses, writer: StoreWriter, number: int, unit: UnitRecord
) -> UnitRecord:
    output = writer.begin(unit)
    try:
        record = output.finish(passes.read(number, unit, output))
    except BaseException:
        output.abandon()
        raise
    writer.remember(record)
    return record
