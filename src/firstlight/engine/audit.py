"""Owns the audit of a start: what each component was planned to take and what it took.

Plans for this very start, with or without a plan file; knows neither report nor HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from firstlight.cache.cache_group import RECURRENT, CacheUsage
from firstlight.cache.far_pool import HOST
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import CachePlan
from firstlight.engine.step_images import StepImage, StepImages
from firstlight.errors import BadInput
from firstlight.metrics.events import MemoryMeasured, Recorder
from firstlight.models.spec import ModelSpec
from firstlight.planning.activations import StepShape, encoder_bytes, step_bytes
from firstlight.planning.audit import (
    AuditRecord,
    Compared,
    append_history,
    history_path,
    last_measured,
    read_history,
)
from firstlight.planning.caches import HeldCaches, held_cache_bytes
from firstlight.planning.constants import HOST_FRAMEWORK_BYTES
from firstlight.planning.memory import feature_bytes
from firstlight.planning.packed import packed_bytes
from firstlight.planning.weights import held_bytes
from firstlight.planning.work import model_work
from firstlight.runner.protocol import CachesAllocated, RankLoaded, StepDone
from firstlight.schedule.step import StepPlan
from firstlight.sharding.layout import Layout
from firstlight.sharding.tier_pieces import slab_bytes


class Audit:
    """Compares component by component as measurements come; every figure is of one rank.

    Packed weights, framework and resident memory are compared on the host alone: elsewhere weights
    are not packed, and a device's memory holds neither interpreter nor libraries.
    """

    def __init__(self, settings: EngineSettings, spec: ModelSpec, recorder: Recorder) -> None:
        self._settings = settings
        self._spec = spec
        self._recorder = recorder
        self._layout = Layout(tp=settings.tp, ep=settings.ep)
        self._work = model_work(spec, settings.dtype, has_tiers=bool(settings.tiers))
        self._found: dict[str, Compared] = {}
        self._on_host = True
        self._framework = HOST_FRAMEWORK_BYTES
        self._packed: int | None = None
        self._held: dict[int, int] = {}
        self._native: frozenset[str] = frozenset()
        self._images = StepImages()
        self._features: dict[str, int] = {}
        self._touched = 0
        self._path = history_path(Path(settings.model))
        self._earlier = _earlier(self._path)

    @property
    def compared(self) -> tuple[Compared, ...]:
        """Every component measured so far, those furthest off first."""
        return tuple(sorted(self._found.values(), key=lambda one: -abs(one.error or 0.0)))

    @property
    def lines(self) -> tuple[str, ...]:
        """One line a component; those that are off are called so."""
        return tuple(f"{'off: ' if one.is_off else ''}{one.text}" for one in self.compared)

    def loaded(self, reports: Sequence[RankLoaded]) -> None:
        """Takes in what ranks held once their weights were there."""
        table = self._work.table
        budget = self._settings.weights_budget_bytes
        planned = sum(held_bytes(self._spec, table, self._layout, 0, budget).values())
        self._native = frozenset(_native_operations(reports[0].kernels))
        known = last_measured(self._earlier, "framework/")
        self._framework = known or HOST_FRAMEWORK_BYTES
        for report in reports:
            self._note(f"weights/{report.rank}", planned, report.weights_allocated)
            self._on_host = not report.owned
            self._held[report.rank] = report.packed_bytes or report.weights_allocated
            if report.packed_bytes:
                sizes = packed_bytes(table, self._layout, report.stored)
                sizes = sizes if budget is None else None  # only what stays is packed
                self._packed = report.packed_bytes if sizes is None else sizes[0]
                if sizes is not None:
                    self._note(f"packed/{report.rank}", sizes[0], report.packed_bytes)
        if self._packed is None:
            self._packed = planned

    def caches(self, reports: Sequence[CachesAllocated], plan: CachePlan) -> None:
        """Takes in what ranks allocated for caches of the blocks and slots they were given."""
        settings = self._settings
        held = HeldCaches(
            plan.num_blocks,
            settings.block_size,
            plan.num_slots,
            plan.window_blocks,
            settings.kv_dtype,
        )
        size = self._work.table.element_bytes
        sizes = held_cache_bytes(self._spec.states, held, tp=settings.tp, element_bytes=size)
        slots = sizes.pop(RECURRENT, 0)
        for report in reports:
            paged = report.allocated_bytes - report.recurrent_bytes
            self._note(f"kv/{report.rank}", sum(sizes.values()), paged)
            if slots or report.recurrent_bytes:
                self._note(f"recurrent/{report.rank}", slots, report.recurrent_bytes)
            if self._on_host and report.rest_bytes:
                # Caches are given memory as they are used: none has any yet.
                self._note_framework(report.rank, report.rest_bytes, touched=0)

    def step(
        self, plan: StepPlan, done: Sequence[StepDone], usage: Callable[[], CacheUsage]
    ) -> None:
        """Takes in a step; ranks measure those that are larger than all before. `usage` counts the
        cache, for those alone.
        """
        encoded = self._images.reached(plan)
        if encoded:
            self._keep_images(encoded, done)
        if not (done[0].activation_bytes or done[0].step_peak_bytes):
            return
        planned, counted = self._step_bytes(plan, encoded), usage()
        self._note_tiers(counted, done)
        if self._on_host:
            self._touched = max(self._touched, _touched(counted))
        for report in done:
            if report.activation_bytes:
                self._note(f"activations/{report.rank}", planned, report.activation_bytes)
            if self._on_host:
                self._note_resident(report, planned)

    def _note_tiers(self, usage: CacheUsage, done: Sequence[StepDone]) -> None:
        places = [(one, group.unit_bytes) for group in usage.groups for one in group.far]
        host = [(one, size) for one, size in places if one.place == HOST]
        planned = sum(slab_bytes(one.touched, one.usable, size) for one, size in host)
        for report in done:
            if planned or report.tier_host_bytes:
                self._note(f"tier_host/{report.rank}", planned, report.tier_host_bytes)

    def _step_bytes(self, plan: StepPlan, encoded: Sequence[StepImage]) -> int:
        shape = StepShape(
            tokens=plan.num_tokens,
            span=max(step.count for step in plan.steps),
            context=max(step.start + step.count for step in plan.steps),
            sequences=max(1, sum(step.sample for step in plan.steps)),
        )
        planned = step_bytes(self._work, self._layout, shape, self._native)
        patches = [encoder_bytes(self._work, image.num_patches) for image in encoded]
        return max([planned, *patches])

    def _keep_images(self, encoded: Sequence[StepImage], done: Sequence[StepDone]) -> None:
        """Compares features kept with those of all images seen, as long as the cache has room."""
        self._features |= {image.digest: image.num_tokens for image in encoded}
        planned = feature_bytes(self._work, list(self._features.values()))
        if planned > self._settings.encoder_cache_bytes:
            return
        for report in done:
            if report.encoder_bytes:
                self._note(f"encoder/{report.rank}", planned, report.encoder_bytes)

    def _note_resident(self, report: StepDone, planned: int) -> None:
        touched = self._touched + report.tier_staging_bytes
        beside = self._held.get(report.rank, 0) + touched
        self._note_framework(report.rank, report.resident_bytes, touched=touched)
        if report.step_peak_bytes:
            whole = self._framework + beside + planned
            self._note(f"resident/{report.rank}", whole, report.step_peak_bytes)

    def _note_framework(self, rank: int, resident: int, *, touched: int) -> None:
        beside = resident - self._held.get(rank, 0) - touched
        self._note(f"framework/{rank}", self._framework, beside)

    def keep(self) -> None:
        """Writes this start into the history beside the store; a store on a medium that cannot be
        written has none."""
        if self._path is None:
            return
        settings = self._settings
        entry = AuditRecord(
            at=time.time(),
            model=settings.model,
            fleet=f"{settings.tp}x{settings.device}",
            degrees={"tp": settings.tp, "ep": settings.ep},
            errors={name: one.error for name, one in self._found.items()},
            measured={name: one.measured for name, one in self._found.items()},
        )
        try:
            self._path.parent.mkdir(exist_ok=True)
            append_history(self._path, entry)
        except OSError:
            return

    def _note(self, component: str, planned: int, measured: int) -> None:
        self._found[component] = Compared(component, planned, measured)
        self._recorder.record(
            MemoryMeasured(component=component, predicted_bytes=planned, actual_bytes=measured)
        )


def _touched(usage: CacheUsage) -> int:
    """Bytes of blocks and slots that were written, in the host tier too: caches are given memory as
    they are used.
    """
    near = sum((group.used + group.cached) * group.unit_bytes for group in usage.groups)
    pairs = [(one, group.unit_bytes) for group in usage.groups for one in group.far]
    return near + sum(one.touched * size for one, size in pairs if one.place == HOST)


def _native_operations(kernels: Sequence[str]) -> Iterator[str]:
    """The operations whose kernel is a native one, of lines that describe the choice."""
    for line in kernels:
        name, _, chosen = line.partition(": ")
        if chosen.startswith("native"):
            yield name


def _earlier(path: Path | None) -> tuple[AuditRecord, ...]:
    try:
        return read_history(path) if path is not None else ()
    except (BadInput, OSError):
        return ()
