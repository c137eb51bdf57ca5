"""Owns the process of one rank: joins its group, loads, allocates, then runs plans until told to
stop.
"""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
import zmq
from torch.utils.hooks import RemovableHandle

from firstlight.assembly.build import AssembledModel, BuildOptions
from firstlight.assembly.source import WeightSource, open_source, stored_types
from firstlight.cache.manager import blocks_for, distinct_specs
from firstlight.errors import FirstlightError, OutOfBudget
from firstlight.kernels.builtin import builtin_kernels, machine_query
from firstlight.kernels.registry import KernelSet
from firstlight.layers.layer_state import RecurrentSlots
from firstlight.layers.patterned_attention import set_patterns
from firstlight.metrics.series import resident_bytes
from firstlight.models.spec import with_attention
from firstlight.parallel.mesh import Mesh, join
from firstlight.platforms.find import find_platform
from firstlight.runner.cache_tensors import (
    CacheShape,
    allocate_states,
    planned_cache_bytes,
    state_bytes,
)
from firstlight.runner.encoder_cache import EncoderCache, ImageEncoder
from firstlight.runner.memory import RankDevice
from firstlight.runner.model_runner import ModelRunner, RunnerContext
from firstlight.runner.open_tiers import open_tiers
from firstlight.runner.parent import watch_parent
from firstlight.runner.peak_memory import PeakMemory
from firstlight.runner.protocol import (
    AgreeOnWeights,
    AllocateCaches,
    CachesAllocated,
    CheckWeights,
    FromRank,
    RankFailed,
    RankLoaded,
    RankProgress,
    RankSettings,
    ReloadWeights,
    RunStep,
    StepDone,
    StopRank,
    ToRank,
)
from firstlight.runner.residency import Residency, ResidencyLimits, assemble_within
from firstlight.runner.rows import RowTable
from firstlight.runner.tier_store import TierStore
from firstlight.runner.weight_checks import RankWeights, reading_group
from firstlight.settings.settings import debug_wanted
from firstlight.sharding.layout import Layout

# How often a rank says that a long step goes on.
SECONDS_BETWEEN_SIGNS = 1.0


class RankChannel:
    """The two sockets of a rank: plans in, reports out."""

    def __init__(self, settings: RankSettings) -> None:
        self._context = zmq.Context()
        self._plans = self._context.socket(zmq.PULL)
        self._plans.connect(settings.plan_endpoint)
        self._results = self._context.socket(zmq.PUSH)
        self._results.connect(settings.result_endpoint)
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromRank) -> None:
        """Sends one report to the engine."""
        self._results.send(self._encoder.encode(message))

    def receive(self) -> ToRank:
        """Waits for the next order."""
        return self._decoder.decode(self._plans.recv())

    def close(self) -> None:
        """Flushes what was sent and closes the sockets."""
        self._context.destroy(linger=2000)


class Rank:
    """One rank: its mesh, its part of the model, its caches and its runner."""

    def __init__(self, settings: RankSettings, channel: RankChannel) -> None:
        self._settings = settings
        self._channel = channel
        # Bound before anything else: kernel packages and groups must find the device current.
        self._place = RankDevice(find_platform(settings.device), settings.rank, settings.tp)
        self._place.require_fit(settings.dtype, settings.kv_dtype)
        self._device = torch.device(self._place.bind(settings.threads))
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._mesh: Mesh | None = None
        self._runner: ModelRunner | None = None
        self._told_at = 0.0
        self._tiers: TierStore | None = None
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Joins the group, chooses kernels, loads the weights and reports."""
        settings = self._settings
        began = psutil.Process().create_time()
        self._channel.send(RankProgress(settings.rank, "import torch", began))
        self._channel.send(RankProgress(settings.rank, "import torch", time.time(), ended=True))
        self._mesh = self._phase("join ranks", self._join)
        self._source = self._phase("open weights", self._open)
        self._kernels = self._phase("choose kernels", self._choose_kernels)
        self._model, self._residency = self._phase("load weights", self._load)
        self._weights = self._phase("watch weights", self._watch)
        report = self._model.report
        self._channel.send(
            RankLoaded(
                rank=settings.rank,
                source_digest=self._source.digest,
                rank_digest=report.digest,
                weights_allocated=self._model.allocated_bytes,
                bytes_read=report.bytes_read,
                available_bytes=self._place.available_bytes(kept=self._encoder_cache_bytes),
                owned=self._place.owned,
                device=self._place.description,
                resident_bytes=resident_bytes(),
                kernels=list(self._kernels.describe()),
                threads=torch.get_num_threads(),
                packed_bytes=self._model.packed_bytes,
                stored=stored_types(self._source.weights),
                residency=str(self._residency or ""),
            )
        )

    def serve(self) -> None:
        """Handles orders until StopRank."""
        gc.freeze()  # what start-up made lives on; steps should not look at it again and again
        while not isinstance(order := self._channel.receive(), StopRank):
            if isinstance(order, RunStep):
                self._run(order)
            elif isinstance(order, AllocateCaches):
                self._allocate(order)
            elif isinstance(order, AgreeOnWeights):
                self._channel.send(self._weights.agree())
            elif isinstance(order, CheckWeights):
                self._channel.send(self._weights.check(order))
            else:
                self._reload(order)

    def _join(self) -> Mesh:
        s = self._settings
        return join(
            Layout(tp=s.tp, ep=s.ep),
            s.rank,
            init_method=s.rendezvous,
            backend=self._place.collective_backend,
            timeout_seconds=s.seconds_to_join,
        )

    def _choose_kernels(self) -> KernelSet:
        query = machine_query(platform=self._device.type, dtype=self._settings.dtype)
        return builtin_kernels().resolve(query)

    @property
    def _context_length(self) -> int:
        return self._settings.context_length or self._source.spec.context_length

    def _open(self) -> WeightSource:
        settings = self._settings
        source = open_source(Path(settings.source))
        spec = with_attention(source.spec, settings.attention, settings.block_size)
        return replace(source, spec=spec)

    def _load(self) -> tuple[AssembledModel, Residency | None]:
        assert self._mesh is not None
        settings = self._settings
        self._options = BuildOptions(
            dtype=self._dtype,
            device=self._device,
            num_positions=self._context_length,
            threads=max(1, settings.threads),
            check_digests=settings.check_digests,
            leader_of=reading_group(settings.load_from),
        )
        return assemble_within(
            ResidencyLimits(settings.weights_budget_bytes, settings.weights_host_bytes),
            self._source.spec,
            self._source.weights,
            mesh=self._mesh,
            kernels=self._kernels,
            options=self._options,
            progress=self._report_loading,
        )

    def _watch(self) -> RankWeights:
        assert self._mesh is not None
        return RankWeights(
            self._model,
            self._source,
            mesh=self._mesh,
            kernels=self._kernels,
            options=self._options,
        )

    def _reload(self, order: ReloadWeights) -> None:
        path, progress = Path(order.source), self._report_loading
        answer = self._weights.reload(path, progress=progress, on_replaced=self._use_new_weights)
        self._channel.send(answer)

    def _use_new_weights(self) -> None:
        """What was computed by the old ones goes, and modules made anew tell of long steps too."""
        if self._runner is not None:
            self._runner.forget_images()
        set_patterns(self._model.module, self._source.spec.patterns)
        self._watch_layers()

    def _allocate(self, order: AllocateCaches) -> None:
        settings, states = self._settings, self._source.spec.states
        shape = CacheShape(
            order.num_blocks,
            settings.block_size,
            settings.tp,
            self._dtype,
            self._device,
            order.num_slots,
            order.window_blocks,
            settings.kv_dtype,
        )
        caches, module = allocate_states(states, shape), self._model.module
        held = state_bytes(caches)  # of the device; tiers add what tells of their pages
        set_patterns(module, self._source.spec.patterns)
        assert self._mesh is not None
        digest = self._source.digest
        self._tiers, caches = open_tiers(caches, order, settings, weights=digest)
        context = RunnerContext(
            module,
            caches,
            self._kernels,
            self._device,
            samples=self._mesh.is_first,
            images=self._make_encoder_cache(),
            tiers=self._tiers,
        )
        self._watch_layers()
        pages = blocks_for(self._context_length, settings.block_size)
        table = RowTable(settings.max_sequences, len(distinct_specs(states)), pages)
        self._runner = ModelRunner(context, table)
        slots = [state for state in caches if isinstance(state, RecurrentSlots)]
        self._peak = PeakMemory(
            self._place, self._device, self._model.allocated_bytes + state_bytes(caches)
        )
        self._channel.send(
            CachesAllocated(
                settings.rank,
                planned_cache_bytes(states, shape),
                held,
                state_bytes(slots),
                self._peak.rest_bytes,
            )
        )

    def close(self) -> None:
        """Gives back what outlives a process."""
        if self._tiers is not None:
            self._tiers.close()

    @property
    def _encoder_cache_bytes(self) -> int:
        return self._settings.encoder_cache_bytes if self._source.spec.reads_images else 0

    def _make_encoder_cache(self) -> EncoderCache | None:
        if not self._source.spec.reads_images:
            return None
        encoder = ImageEncoder(self._model.module.encode, self._device, self._dtype)
        return EncoderCache(encoder, budget_bytes=self._encoder_cache_bytes)

    def _watch_layers(self) -> None:
        module = self._model.module
        for hook in self._hooks:
            hook.remove()
        encoder_layers = module.vision.blocks if self._source.spec.reads_images else ()
        layers = (*module.layers, *encoder_layers)
        self._hooks = [layer.register_forward_hook(self._tell_of_long_steps) for layer in layers]

    def _tell_of_long_steps(self, *_: Any) -> None:
        """A step may take minutes on a slow device; who moves from layer to layer is not hung."""
        now = time.time()
        if now - self._told_at > SECONDS_BETWEEN_SIGNS:
            self._told_at = now
            self._channel.send(RankProgress(self._settings.rank, "step", now))

    def _run(self, order: RunStep) -> None:
        assert self._runner is not None, "a step came before the caches"
        self._told_at = time.time()
        self._peak.before(order.plan)
        result = self._runner.run(order.plan)
        measured = self._peak.after()
        self._channel.send(
            StepDone(
                self._settings.rank,
                result,
                resident_bytes(),
                peak_bytes=self._place.peak_bytes(),
                activation_bytes=measured.tensor_bytes,
                step_peak_bytes=measured.peak_bytes,
                encoder_bytes=self._runner.encoder_bytes,
                tier_host_bytes=self._tiers.host_bytes if self._tiers else 0,
                tier_staging_bytes=self._tiers.staging_bytes if self._tiers else 0,
                traffic=self._residency.take_traffic() if self._residency else None,
            )
        )

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        rank = self._settings.rank
        self._channel.send(RankProgress(rank, name, time.time()))
        value = work()
        self._channel.send(RankProgress(rank, name, time.time(), ended=True))
        return value

    def _report_loading(self, phase: str, done: int, total: int, unit: str) -> None:
        self._channel.send(
            RankProgress(self._settings.rank, "load weights", time.time(), done, total)
        )


def main() -> int:
    """Runs a rank from its one JSON argument; returns the process exit code."""
    settings = msgspec.json.decode(sys.argv[1], type=RankSettings)
    watch_parent(settings.parent_id, lambda: os._exit(0))
    channel = RankChannel(settings)
    try:
        with closing(Rank(settings, channel)) as rank:
            rank.start()
            rank.serve()
        return 0
    except FirstlightError as error:
        channel.send(RankFailed(settings.rank, str(error), error.exit_code))
        return error.exit_code
    except torch.OutOfMemoryError as error:
        channel.send(RankFailed(settings.rank, _short_of(error), OutOfBudget.exit_code))
        return OutOfBudget.exit_code
    except Exception as error:  # a process edge: the engine must hear of anything that ends a rank
        channel.send(RankFailed(settings.rank, _describe(error), 1))
        if debug_wanted():
            raise
        return 1
    finally:
        channel.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _short_of(error: Exception) -> str:
    """The allocator's own words, and the ways out: a plan held, and then memory was not there."""
    said = str(error).strip().splitlines()[0]
    return (
        f"{said} The start had found enough free memory: end other programs on the device, lower "
        "the KV budget, max_sequences, chunk_tokens or the context, or use more ranks"
    )


def _describe(error: Exception) -> str:
    """An unforeseen error in one line, with the place it was raised at."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{type(error).__name__} at {where}: {str(error).strip()}"


if __name__ == "__main__":
    sys.exit(main())
