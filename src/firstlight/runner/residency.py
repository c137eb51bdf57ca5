"""Owns a rank's weights when they may take less memory than they have: what stays, what comes and
goes, and how a model is built so.

Knows no request and no cache. The model computes as if everything were there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firstlight.assembly.build import (
    AssembledModel,
    BuildOptions,
    allocate,
    assemble,
    build_on_meta,
    install,
    move_buffers,
    place_parameters,
    set_trainable,
)
from firstlight.assembly.pack import PackReport, pack_modules
from firstlight.checkpoint.executor import Patience, run_jobs
from firstlight.checkpoint.loader import LoadReport
from firstlight.checkpoint.pieces import PieceKey, WeightPieces
from firstlight.checkpoint.progress import Progress, silent
from firstlight.checkpoint.reading_threads import ReadingThreads
from firstlight.checkpoint.watched_weights import Held
from firstlight.kernels.registry import KernelSet
from firstlight.layers.kernel_linear import use_kernels
from firstlight.models.spec import ModelSpec
from firstlight.parallel.apply import apply_rules
from firstlight.parallel.mesh import Mesh
from firstlight.platforms.host import read_host
from firstlight.runner.copy_lane import CopyLane
from firstlight.runner.expert_tiers import ExpertTiers, TieredExperts
from firstlight.runner.layer_stream import LayerStream
from firstlight.runner.piece_feed import PieceFeed
from firstlight.runner.protocol import WeightTraffic
from firstlight.sharding.residency import ResidencyPlan, plan_residency, rank_weights
from firstlight.units import format_bytes

# A request waits for a read: it must be named long before the engine gives the rank up.
SERVING = Patience(alert_seconds=5.0, stall_seconds=120.0)
_LEAST_THREADS = 2
# A thread that reads holds the interpreter between its calls; the one that computes wants it back
# after each kernel, and would wait for Python's 5 ms each time.
_SWITCH_SECONDS = 0.0002


@dataclass(frozen=True)
class ResidencyLimits:
    """What the weights of a rank may take: `budget_bytes` on the device (None: what they need), and
    `host_bytes` of host memory for what does not stay there. `direct` reads pass by the page cache;
    None: where what is streamed would fill more than half of the free host memory. `threads` read
    (None: as many as compute, two at least)."""

    budget_bytes: int | None
    host_bytes: int = 0
    direct: bool | None = None
    threads: int | None = None
    patience: Patience = SERVING


@dataclass(frozen=True)
class Residency:
    """What moves the weights of one rank while it serves; None for what all stays."""

    plan: ResidencyPlan
    feed: PieceFeed
    layers: LayerStream | None
    experts: ExpertTiers | None
    num_experts: int

    def __str__(self) -> str:
        """What does not stay, and what it takes turns in, in one line."""
        plan = self.plan
        said = []
        if plan.streamed:
            size = format_bytes(plan.buffer_bytes)
            layers = len(plan.streamed)
            said.append(f"{layers} layers take turns in {plan.num_buffers} buffers of {size}")
        if plan.num_slots:
            said.append(f"{self.num_experts} experts share {plan.num_slots} slots")
        return "; ".join(said)

    def take_traffic(self) -> WeightTraffic:
        """Returns what was moved since the last call."""
        return self.feed.take_traffic()

    def close(self) -> None:
        """Ends the reading threads."""
        self.feed.threads.close()


def residency_plan(
    spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, limits: ResidencyLimits
) -> ResidencyPlan:
    """Returns what of a rank's weights stays. Raises OutOfBudget for a budget that is too small."""
    layout = mesh.place.layout
    weights = rank_weights(spec.family.table, spec.facts, layout, dtype.itemsize)
    budget = weights.num_bytes if limits.budget_bytes is None else limits.budget_bytes
    return plan_residency(weights, budget)


def assemble_within(
    limits: ResidencyLimits,
    spec: ModelSpec,
    source: Any,
    *,
    mesh: Mesh,
    kernels: KernelSet,
    options: BuildOptions,
    progress: Progress | None = None,
) -> tuple[AssembledModel, Residency | None]:
    """Builds what `assemble` builds, in at most so many bytes of device memory for weights.

    Everything is read once, digests compared, before this returns. The residency is None where all
    weights stay. Raises OutOfBudget for a budget that is too small, and what `assemble` raises.
    """
    plan = residency_plan(spec, mesh, options.dtype, limits)
    if plan.is_whole:
        whole = assemble(
            spec, source, mesh=mesh, kernels=kernels, options=options, progress=progress
        )
        return whole, None
    sys.setswitchinterval(_SWITCH_SECONDS)
    wanted = _Wanted(spec, source, mesh, options, progress or silent)
    return _Build(limits, plan, wanted).run(kernels)


class _Wanted(NamedTuple):
    """The model that is wanted, where its weights are and who is told how far they are."""

    spec: ModelSpec
    source: Any
    mesh: Mesh
    options: BuildOptions
    progress: Progress


class _Build:
    """One model on its way; `_lap` cuts its time into phases without gaps."""

    def __init__(self, limits: ResidencyLimits, plan: ResidencyPlan, wanted: _Wanted) -> None:
        self._limits, self._plan = limits, plan
        self._spec, source, self._mesh, self._options, self._progress = wanted
        spec, mesh, options = self._spec, self._mesh, self._options
        self._last = perf_counter()
        self._seconds: dict[str, float] = {}
        who = f"rank {mesh.place.rank}"
        self._direct = _passes_cache(plan) if limits.direct is None else limits.direct
        self._pieces = WeightPieces(
            source, spec, mesh.place, check=options.check_digests, direct=self._direct
        )
        threads = ReadingThreads(
            limits.threads or max(_LEAST_THREADS, options.threads),
            patience=limits.patience,
            who=who,
        )
        self._feed = PieceFeed(self._pieces, threads, CopyLane(options.device), options.dtype)
        self._total = sum(piece.num_bytes for piece in self._pieces.pieces.values())
        self._done = 0
        self._held: dict[str, Held] = {}
        self._stays = [key for key in self._pieces.pieces if not self._moves(key)]
        self._lap("plan")

    def run(self, kernels: KernelSet) -> tuple[AssembledModel, Residency]:
        spec, options = self._spec, self._options
        module = build_on_meta(spec, kernels, options.num_positions)
        held = self._load_resident(module)
        packed = self._pack(module, kernels) if options.pack else None
        layers, experts = self._make_layers(module), self._make_experts(module)
        install(module, {}, spec)
        move_buffers(module, options.device)
        set_trainable(module, False)
        self._read_rest(layers, experts)
        apply_rules(module, spec.family.table, spec.facts, self._mesh)
        if layers is not None:
            layers.start()
        held += sum(part.device_bytes for part in (layers, experts) if part is not None)
        model = AssembledModel(
            module, self._report(), self._plan.num_bytes, held, packed, self._held
        )
        num_experts = sum(key.expert >= 0 for key in self._pieces.pieces)
        return model, Residency(self._plan, self._feed, layers, experts, num_experts)

    def _moves(self, key: PieceKey) -> bool:
        """Says whether a piece does not stay."""
        if key.expert >= 0:
            return self._plan.num_slots > 0
        return key.layer in self._plan.streamed

    def _load_resident(self, module: nn.Module) -> int:
        """Fills what stays; returns its bytes."""
        names = {t.name for key in self._stays for t in self._pieces.pieces[key].targets}
        parameters = allocate(self._spec, self._mesh, self._options, names)
        place_parameters(module, parameters, self._spec)
        first = self._mesh.place.experts(self._spec.facts.num_experts).start
        jobs, filled = [], []
        for key in self._stays:
            own = {t.name for t in self._pieces.pieces[key].targets}
            tensors: Mapping[str, Tensor] = {
                name: parameters[name] if key.expert < 0 else parameters[name][key.expert - first]
                for name in own
            }
            filled.append((key, tensors))
            jobs += self._pieces.jobs(key, tensors)
        run_jobs(
            jobs,
            threads=self._options.threads,
            most_threads=4 * self._options.threads,
            phase="load",
            progress=lambda phase, done, _total, unit: self._progress(
                phase, done, self._total, unit
            ),
            patience=Patience(),
            who=f"rank {self._mesh.place.rank}",
        )
        self._done = sum(job.num_bytes for job in jobs)
        for key, tensors in filled:
            self._pieces.compare(key, tensors)
        self._held = {name: module.get_parameter(name) for name in parameters}
        self._lap("load")
        return sum(tensor.nbytes for tensor in parameters.values())

    def _pack(self, module: nn.Module, kernels: KernelSet) -> PackReport:
        """Packs what stays. Layers that move are read as they are, and compute by the kernels that
        packed ones equal bit for bit."""
        with _without(module, self._plan.streamed):
            packed = pack_modules(module, kernels)
        if kernels.packs_weights and self._options.dtype == torch.float32:
            for layer in self._plan.streamed:
                use_kernels(module.get_submodule(f"layers.{layer}"), kernels)
        self._held.update(packed.weights)
        return packed

    def _make_layers(self, module: nn.Module) -> LayerStream | None:
        plan = self._plan
        if not plan.streamed:
            return None
        layers = LayerStream(
            plan.streamed,
            self._feed,
            device=self._options.device,
            num_buffers=plan.num_buffers,
            buffer_bytes=plan.buffer_bytes,
        )
        layers.attach(module)
        return layers

    def _make_experts(self, module: nn.Module) -> ExpertTiers | None:
        plan = self._plan
        if not plan.num_slots:
            return None
        keys = [key for key in self._pieces.pieces if key.expert >= 0]
        tiers = ExpertTiers(keys, self._feed, device=self._options.device, num_slots=plan.num_slots)
        here = self._mesh.place.experts(self._spec.facts.num_experts)
        paths = {
            self._feed.image(key).names[0].rpartition(".")[0]: key.layer
            for key in keys
            if key.expert == here.start
        }
        for path, layer in paths.items():
            owner, _, leaf = path.rpartition(".")
            swapped = TieredExperts(module.get_submodule(path), layer, here, tiers)
            setattr(module.get_submodule(owner), leaf, swapped)
        return tiers

    def _read_rest(self, layers: LayerStream | None, experts: ExpertTiers | None) -> None:
        """Reads what moves once: damage is found now, and host memory is filled."""
        host_bytes = self._limits.host_bytes
        if layers is not None:
            host_bytes -= layers.read_all(host_bytes, self._advanced)
        if experts is not None:
            experts.read_all(host_bytes, self._advanced)
        self._feed.take_traffic()
        self._lap("load what moves")

    def _advanced(self, num_bytes: int, what: str) -> None:
        self._done += num_bytes
        self._progress("load", self._done, self._total, what)

    def _lap(self, phase: str) -> None:
        now = perf_counter()
        self._seconds[phase] = now - self._last
        self._last = now

    def _report(self) -> LoadReport:
        self._lap("build")
        return LoadReport(
            self._total,
            self._seconds,
            {},
            self._pieces.digest(),
            self._options.threads,
            self._direct,
        )


@contextmanager
def _without(module: Any, layers: tuple[int, ...]) -> Iterator[None]:
    """Takes layers out of a model for a while."""
    kept = {layer: module.layers[layer] for layer in layers}
    for layer in kept:
        module.layers[layer] = nn.Identity()
    yield
    for layer, block in kept.items():
        module.layers[layer] = block


def _passes_cache(plan: ResidencyPlan) -> bool:
    """Says whether what is read in turns would push itself out of the page cache."""
    streamed = plan.whole_bytes - plan.num_bytes
    return streamed * 2 > read_host().memory.available_bytes
