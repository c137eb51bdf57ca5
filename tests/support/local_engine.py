"""Scheduler, cache bookkeeping and one rank's runner in this process, driven step by step.

The same objects that serve, without sockets: what tests of equality and of failures need.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import CacheManager, blocks_for, distinct_specs
from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.registry import KernelSet
from firstlight.layers.packed_batch import pack_whole
from firstlight.layers.patterned_attention import set_patterns
from firstlight.models.spec import with_attention
from firstlight.parallel.mesh import Mesh
from firstlight.runner.cache_tensors import CacheShape, allocate_states
from firstlight.runner.encoder_cache import EncoderCache, ImageEncoder
from firstlight.runner.model_runner import ModelRunner, RunnerContext
from firstlight.runner.open_tiers import make_store
from firstlight.runner.protocol import StepDone, joint_result
from firstlight.runner.rows import RowTable
from firstlight.schedule.answers import RequestUpdate
from firstlight.schedule.request import MediaItem, SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import StepResult
from firstlight.sharding.layout import Layout

CPU = torch.device("cpu")


def fast_kernels() -> KernelSet:
    """Returns the kernels this machine would serve fp32 with."""
    return builtin_kernels().resolve(machine_query())


@dataclass(frozen=True)
class EngineShape:
    """Sizes of a local engine; small ones force chunks and preemptions."""

    num_blocks: int = 256
    block_size: int = 16
    max_sequences: int = 16
    max_batch_tokens: int = 512
    chunk_tokens: int = 128
    context_length: int = 512
    encoder_cache_bytes: int = 1024**2
    num_slots: int = 33
    window_blocks: dict[int, int] = field(default_factory=dict)
    turn_tokens: int = 64
    kv_dtype: str = "auto"
    attention: str = "full"
    far: tuple[FarSizes, ...] = ()
    tier_folder: str = ""
    allocator: str = "paged"


@dataclass
class Outcome:
    """All that became known of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    num_cached: int = 0

    def take(self, update: RequestUpdate) -> None:
        """Adds what an update brings."""
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or []
        if update.prompt_logprobs is not None:
            self.prompt_logprobs += update.prompt_logprobs.tokens
        self.finish = update.finish.value if update.finish else None
        self.error = update.error
        self.num_cached = update.num_cached


class LocalEngine:
    """One engine over one model folder. `model` is one that was loaded from it before.

    With a `mesh` of several ranks every rank runs one, and takes the first rank's results.
    """

    def __init__(
        self,
        folder: Path,
        shape: EngineShape | None = None,
        kernels: KernelSet | None = None,
        model: Any = None,
        *,
        device: torch.device = CPU,
        mesh: Mesh | None = None,
    ) -> None:
        shape = shape or EngineShape()
        mesh = mesh or Mesh(Layout().place(0))
        self._group, self._device = mesh.tensor, device
        kernels = kernels or reference_kernels()
        source = open_source(folder)
        self.spec = with_attention(source.spec, shape.attention, shape.block_size)
        if model is None:
            options = BuildOptions(torch.float32, device, shape.context_length)
            model = assemble(
                source.spec, source.weights, mesh=mesh, kernels=kernels, options=options
            ).module
        self.model = model
        set_patterns(model, self.spec.patterns)
        cache_shape = CacheShape(
            shape.num_blocks,
            shape.block_size,
            mesh.tp,
            torch.float32,
            device,
            shape.num_slots,
            shape.window_blocks,
            shape.kv_dtype,
        )
        self.states = allocate_states(self.spec.states, cache_shape)
        pages = blocks_for(shape.context_length, shape.block_size)
        groups = distinct_specs(self.spec.states)
        self.table = RowTable(shape.max_sequences, len(groups), pages)
        self.images: EncoderCache | None = None
        if self.spec.reads_images:
            encoder = ImageEncoder(self.model.encode, device, torch.float32)
            self.images = EncoderCache(encoder, budget_bytes=shape.encoder_cache_bytes)
        samples = mesh.is_first
        layout = {"weights": source.digest, "tp": mesh.tp, "block_size": shape.block_size}
        layout["rank"] = mesh.place.rank
        self.tiers, self.states = make_store(
            self.states, shape.far, folder=shape.tier_folder, layout=layout
        )
        context = RunnerContext(
            self.model, self.states, kernels, device, samples, self.images, self.tiers
        )
        self.runner = ModelRunner(context, self.table)
        self.cache = CacheManager(
            groups,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            model_digest="tiny",
            num_slots=shape.num_slots,
            options=CacheOptions(
                shape.chunk_tokens,
                shape.window_blocks,
                shape.turn_tokens,
                unit_bytes=() if self.tiers is None else self.tiers.unit_bytes,
                far=shape.far,
                allocator=shape.allocator,
            ),
        )
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_sequences=shape.max_sequences,
                max_batch_tokens=shape.max_batch_tokens,
                chunk_tokens=shape.chunk_tokens,
                max_waiting=1000,
                context_length=shape.context_length,
            ),
            self.cache,
        )
        self.outcomes: dict[str, Outcome] = {}
        self.moved: Counter[tuple[str, bool]] = Counter()  # bytes by place, inward or not
        self._count = 0

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        media: Sequence[MediaItem] = (),
        **fields: Any,
    ) -> str:
        """Queues a request and returns its id. `fields` are those of SubmittedRequest."""
        self._count += 1
        request_id = f"request-{self._count}"
        self.outcomes[request_id] = Outcome()
        self.scheduler.add(
            SubmittedRequest(
                request_id=request_id,
                prompt_ids=list(prompt),
                params=params,
                media=tuple(media),
                **fields,
            )
        )
        return request_id

    def cancel(self, request_id: str) -> None:
        """Ends a request at once, if it has not ended."""
        for update in self.scheduler.cancel([request_id]):
            self.outcomes[request_id].take(update)

    def step(self) -> bool:
        """Runs one step; False when there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        result = self._agreed(self.runner.run(plan))
        for update in self.scheduler.update(result):
            self.outcomes[update.request_id].take(update)
        for flow in result.tiers.flows if result.tiers is not None else ():
            self.moved[flow.place, flow.inward] += flow.num_bytes
        return True

    def _agreed(self, result: StepResult) -> StepResult:
        """Only the first rank samples: every scheduler goes on with what it found. What tiers did
        is known when all ranks have said it.
        """
        if self._group is None:
            return result
        if self.tiers is not None:
            done: list[Any] = [None] * dist.get_world_size(self._group)
            report = StepDone(dist.get_rank(self._group), result, 0, 0)
            dist.all_gather_object(done, report, group=self._group)
            return joint_result(done)
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, group=self._group, group_src=0, device=self._device)
        agreed: StepResult = shared[0]
        return agreed

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Outcome]:
        """Serves all prompts at once to their end."""
        ids = [self.submit(prompt, params) for prompt in prompts]
        while self.step():
            pass
        self.scheduler.check_integrity()
        return [self.outcomes[request_id] for request_id in ids]


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    """Returns greedy parameters."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def random_prompts(*lengths: int, below: int = 300) -> list[list[int]]:
    """Returns prompts of these lengths, the same ones each time; ids are at least 3."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, below, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def plain_greedy(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Decodes greedily by running the whole sequence anew for each token, without a cache."""
    ids = list(prompt)
    for _ in range(max_tokens):
        carry = model(torch.tensor(ids), pack_whole([len(ids)]))
        ids.append(int(model.head(carry)[-1].argmax()))
    return ids[len(prompt) :]
