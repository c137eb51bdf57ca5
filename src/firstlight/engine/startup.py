"""Owns the order in which an engine comes up: ranks, weights, caches, warm-up, gate.

Each step is a phase of the timeline; the first that fails ends the start with its reason.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.manager import CacheManager, distinct_specs
from firstlight.checkpoint.known_answers import KnownAnswers, read_answers
from firstlight.engine.audit import Audit
from firstlight.engine.gate import GateResult, compare_answers, fit_answers
from firstlight.engine.ranks import RankGroup, free_rendezvous
from firstlight.engine.self_test import Served, decoding_request, scoring_request, serve_to_end
from firstlight.engine.settings import EngineSettings
from firstlight.engine.sizing import (
    CacheNeeds,
    CachePlan,
    cache_needs,
    left_for_caches,
    plan_caches,
)
from firstlight.engine.socket_folder import make_socket_folder
from firstlight.engine.timeline import Timeline
from firstlight.engine.weight_guard import WeightGuard, first_problem
from firstlight.engine.weight_source import check_replacement
from firstlight.errors import BadInput, CheckFailed
from firstlight.metrics.events import CacheState, PhaseDone, Recorder
from firstlight.models.spec import ModelSpec, with_attention
from firstlight.planning.tier_sizing import plan_tiers, tier_bytes
from firstlight.runner.model_path import read_spec
from firstlight.runner.protocol import (
    AllocateCaches,
    CachesAllocated,
    RankLoaded,
    RankProgress,
    RankSettings,
    ReloadWeights,
    StepDone,
    WeightsAgreed,
)
from firstlight.schedule.request import SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import StepPlan
from firstlight.settings.tiers import parse_tiers
from firstlight.sharding.layout import Layout
from firstlight.sharding.slices import check_layout
from firstlight.units import format_bytes, format_seconds

# Tokens of the warm-up prompt, and output tokens after it: both forms of a step are run once.
WARM_UP_TOKENS = 64
WARM_UP_OUTPUT = 2
RELOAD = "reload weights"


@dataclass(frozen=True)
class Running:
    """An engine that is up: its ranks and its scheduler, and facts worth showing."""

    ranks: RankGroup
    scheduler: Scheduler
    cache: CacheManager
    spec: ModelSpec
    context_length: int
    facts: dict[str, str | int | float]
    audit: Audit | None = None
    guard: WeightGuard | None = None


class Startup:
    """Brings an engine up once. `advanced` is called whenever something moved: it feeds
    liveness.
    """

    def __init__(
        self,
        settings: EngineSettings,
        timeline: Timeline,
        recorder: Recorder,
        advanced: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._timeline = timeline
        self._recorder = recorder
        self._advanced = advanced
        self._facts: dict[str, str | int | float] = {}
        self._num_reloads = 0
        self.ranks: RankGroup | None = None

    def run(self) -> Running:
        """Returns the running engine.

        Raises FirstlightError of the kind that fits the step that failed.
        """
        settings, timeline = self._settings, self._timeline
        with timeline.phase("start ranks"):
            self.ranks = self._start_ranks()
        spec = read_spec(Path(settings.model))
        spec = with_attention(spec, settings.attention, settings.block_size)
        check_layout(spec.facts, Layout(tp=settings.tp, ep=settings.ep))
        needs = cache_needs(settings, spec)
        self._audit = Audit(settings, spec, self._recorder)
        with timeline.phase("load weights"):
            loaded = self._collect_loaded(self.ranks)
            guard = self._agree_on_weights(self.ranks)
        with timeline.phase("allocate caches"):
            plan = self._allocate_caches(self.ranks, needs, loaded)
        scheduler, cache = self._make_scheduler(needs, plan, loaded)
        running = Running(
            ranks=self.ranks,
            scheduler=scheduler,
            cache=cache,
            spec=spec,
            context_length=needs.context_length,
            facts=self._facts,
            audit=self._audit,
            guard=guard,
        )
        with timeline.phase("warm up"):
            self._warm_up(running)
        with timeline.phase("start-up gate"):
            self._gate(running)
            running.cache.forget()  # nobody will ask what the engine asked itself
        with timeline.phase("audit memory"):
            self._close_audit()
        self._record_phases()
        return running

    def _start_ranks(self) -> RankGroup:
        settings = self._settings
        directory = make_socket_folder()
        self.directory = directory
        common = RankSettings(
            rank=0,
            tp=settings.tp,
            ep=settings.ep,
            source=settings.model,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            rendezvous=free_rendezvous() if settings.tp > 1 else "",
            plan_endpoint="",
            result_endpoint=f"ipc://{directory}/results",
            max_sequences=settings.max_sequences,
            context_length=settings.context_length or 0,
            block_size=settings.block_size,
            kv_dtype=settings.kv_dtype,
            attention=settings.attention,
            parent_id=os.getpid(),
            check_digests=settings.check_digests,
            encoder_cache_bytes=settings.encoder_cache_bytes,
            weights_budget_bytes=settings.weights_budget_bytes,
            weights_host_bytes=settings.weights_host_bytes,
            load_from=settings.load_from,
        )
        return RankGroup(common, directory, stall_seconds=settings.stall_seconds)

    def _collect_loaded(self, ranks: RankGroup) -> list[RankLoaded]:
        loaded = ranks.collect(RankLoaded, on_progress=self._on_progress)
        self._audit.loaded(loaded)
        self._facts["weights_bytes"] = sum(report.weights_allocated for report in loaded)
        if loaded[0].residency:
            self._facts["weights_residency"] = loaded[0].residency
        self._facts["source_digest"] = loaded[0].source_digest
        self._facts["threads_per_rank"] = loaded[0].threads
        self._facts["device"] = loaded[0].device
        self._facts["dtype"] = self._settings.dtype
        self._facts["kernels"] = "\n".join(loaded[0].kernels)
        return loaded

    def _agree_on_weights(self, ranks: RankGroup) -> WeightGuard:
        """Refuses ranks that hold other weights than the rest; from here on all are watched."""
        period = self._settings.weights_check_seconds
        guard = WeightGuard(ranks, self._recorder, period_seconds=period)
        agreed = guard.agree()
        if problem := first_problem(agreed):
            raise CheckFailed(problem)
        seconds = max(report.seconds for report in agreed)
        self._facts["weights_watch_seconds"] = seconds
        text = f"checksums in {format_seconds(seconds)}, the same on every rank"
        self._timeline.detail("load weights", text)
        return guard

    def reload(self, running: Running, source: str | None) -> None:
        """Reads weights again in place, from another source if one is given, empties the prefix
        cache and asks the known answers again. No request may run.

        Raises BadInput and its like before anything is touched, and CheckFailed afterwards: weights
        are then not to be used.
        """
        settings, guard = self._settings, running.guard
        if settings.weights_budget_bytes is not None:
            raise BadInput(
                "weights within a budget are not replaced in place; start a service with the others"
            )
        assert guard is not None, "weights are reloaded that nobody watches"
        path = source or settings.model
        check_replacement(Path(settings.model), Path(path), load_from=settings.load_from)
        self._timeline.begin(RELOAD, time.time(), detail=path)
        try:
            running.ranks.send(ReloadWeights(path))
            reports = running.ranks.collect(WeightsAgreed, on_progress=self._on_progress)
            if problem := first_problem(guard.agreed(reports)):
                raise CheckFailed(f"the weights of {path} could not be loaded: {problem}")
            self._settings = msgspec.structs.replace(settings, model=path)
            self._facts["source_digest"] = reports[0].source_digest
            self._num_reloads += 1
            running.cache.forget(f"{reports[0].source_digest} {self._num_reloads}")
            self._gate(running)
            running.cache.forget()
        finally:
            self._timeline.end(RELOAD, time.time())

    def _allocate_caches(
        self, ranks: RankGroup, needs: CacheNeeds, loaded: list[RankLoaded]
    ) -> CachePlan:
        settings = self._settings
        available = min(report.available_bytes for report in loaded)
        if settings.memory_bytes is not None:
            held = max(report.weights_allocated for report in loaded)
            available = min(available, max(0, settings.memory_bytes - held))
        owned = all(report.owned for report in loaded)
        tiers = parse_tiers(settings.tiers)
        available = left_for_caches(available, needs, tiers, owned=owned)
        plan = plan_caches(needs, available=available, budget=settings.kv_budget_bytes, owned=owned)
        self._far = plan_tiers(needs.states, needs.unit_bytes, tiers)
        ranks.send(
            AllocateCaches(
                plan.num_blocks,
                plan.num_slots,
                plan.window_blocks,
                [(size.host, size.disk) for size in self._far],
                str(tiers.folder or ""),
            )
        )
        reports = ranks.collect(CachesAllocated)
        self._audit.caches(reports, plan)
        for report in reports:
            if not report.allocated_bytes == report.planned_bytes == plan.num_bytes:
                raise CheckFailed(
                    f"rank {report.rank} allocated {format_bytes(report.allocated_bytes)} of "
                    f"caches and planned {format_bytes(report.planned_bytes)}; the engine split "
                    f"its budget for {format_bytes(plan.num_bytes)}"
                )
        self._note_caches(needs, plan)
        return plan

    def _note_caches(self, needs: CacheNeeds, plan: CachePlan) -> None:
        """Facts and gauges of caches that are allocated; those of slots only where there are some.

        Slots and blocks are bytes of one rank, the null ones included.
        """
        facts = self._facts
        self._recorder.record(CacheState(pool="kv", used_bytes=0, total_bytes=plan.paged_bytes))
        facts["kv_bytes_per_rank"] = plan.paged_bytes
        facts["kv_tokens"] = (plan.num_blocks - 1) * needs.block_size
        facts["kv_dtype"] = needs.kv_dtype
        facts["allocator"] = self._settings.allocator
        if self._far:
            host, disk = tier_bytes(self._far, needs.unit_bytes)
            facts["tier_host_bytes_per_rank"], facts["tier_disk_bytes_per_rank"] = host, disk
        for kind, size in needs.paged_bytes_by_kind(plan.num_blocks).items():
            facts[f"{kind}_bytes_per_rank"] = size
        if plan.num_slots:
            self._recorder.record(
                CacheState(pool="recurrent", used_bytes=0, total_bytes=plan.slot_bytes)
            )
            facts["recurrent_bytes_per_rank"] = plan.slot_bytes
            facts["recurrent_bytes_per_sequence"] = needs.slot_bytes
            facts["recurrent_slots"] = plan.num_slots - 1
            facts["snapshot_slots"] = plan.num_slots - needs.live_slots

    def _make_scheduler(
        self, needs: CacheNeeds, plan: CachePlan, loaded: list[RankLoaded]
    ) -> tuple[Scheduler, CacheManager]:
        settings = self._settings
        cache = CacheManager(
            distinct_specs(needs.states),
            num_blocks=plan.num_blocks,
            block_size=settings.block_size,
            model_digest=loaded[0].source_digest,
            num_slots=plan.num_slots,
            options=CacheOptions(
                settings.chunk_tokens,
                plan.window_blocks,
                unit_bytes=needs.unit_bytes,
                far=self._far,
                allocator=settings.allocator,
            ),
        )
        limits = SchedulerSettings(
            max_sequences=settings.max_sequences,
            max_batch_tokens=settings.max_batch_tokens,
            chunk_tokens=settings.chunk_tokens,
            prompt_share=settings.prompt_share,
            max_waiting=settings.max_waiting,
            context_length=needs.context_length,
        )
        return Scheduler(limits, cache), cache

    def _warm_up(self, running: Running) -> None:
        """Runs prompts and decode steps once, on the path that requests take."""
        tokens = min(WARM_UP_TOKENS, running.context_length - WARM_UP_OUTPUT)
        vocabulary = running.spec.vocab_size
        requests = [
            SubmittedRequest(
                request_id=f"warm-up-{index}",
                prompt_ids=[(7 * i + index) % vocabulary for i in range(tokens)],
                params=SamplingParams(max_tokens=WARM_UP_OUTPUT, temperature=0.0),
                salt="warm-up",
            )
            for index in range(min(2, self._settings.max_sequences))
        ]
        self._serve_own(running, requests)

    def _gate(self, running: Running) -> None:
        answers = read_answers(Path(self._settings.model))
        if answers is None or self._settings.skip_gate:
            why = "skipped as asked" if answers is not None else "none recorded beside the weights"
            self._facts["known_answers"] = f"not checked: {why}"
            self._timeline.detail("start-up gate", f"known answers {why}")
            return
        answers = fit_answers(answers, running.context_length)
        result = self._ask(running, answers)
        self._facts["known_answers"] = result.summary
        self._facts["known_answers_compared"] = result.compared
        self._timeline.detail("start-up gate", result.summary)
        if not result.passed:
            raise CheckFailed(
                f"the service does not give the known answers of {self._settings.model}: "
                + result.shown_failures
            )

    def _ask(self, running: Running, answers: KnownAnswers) -> GateResult:
        """Scores the known texts, and lets the service continue them one token at a time; what it
        then said of its own tokens must be what it says when it reads them at once.
        """
        cases = answers.cases
        scoring = [scoring_request(f"gate-{case.name}", case.token_ids) for case in cases]
        decoding = [decoding_request(case) for case in cases]
        found = self._serve_own(running, [*scoring, *decoding])
        scored, decoded = found[: len(cases)], found[len(cases) :]
        settings, scores = self._settings, [served.scores for served in scored]
        result = compare_answers(answers, scores, settings.dtype, settings.kv_dtype)
        again = [
            scoring_request(f"again-{case.name}", [*request.prompt_ids, *served.token_ids])
            for case, request, served in zip(cases, decoding, decoded, strict=True)
        ]
        rescored = [served.scores for served in self._serve_own(running, again)]
        return result.with_decoding([s.logprobs for s in decoded], rescored)

    def _close_audit(self) -> None:
        """Shows the comparison of plan and measurement, and keeps it for the next start."""
        audit = self._audit
        self._facts["memory_audit"] = "\n".join(audit.lines)
        off = [one.component for one in audit.compared if one.is_off]
        text = f"off by more than 3%: {', '.join(off)}" if off else "every component as planned"
        self._timeline.detail("audit memory", text)
        audit.keep()

    def _serve_own(self, running: Running, requests: Sequence[SubmittedRequest]) -> list[Served]:
        def on_step(plan: StepPlan, done: Sequence[StepDone]) -> None:
            self._facts["ranks_resident_bytes"] = sum(r.resident_bytes for r in done)
            self._audit.step(plan, done, running.cache.usage)

        return serve_to_end(
            running.ranks, running.scheduler, requests, advanced=self._advanced, on_step=on_step
        )

    def _on_progress(self, message: RankProgress) -> None:
        self._advanced()
        parent = f"rank {message.rank}"
        if message.ended:
            self._timeline.end(message.phase, message.at, parent=parent)
        elif message.total:
            text = f"{format_bytes(message.done)} of {format_bytes(message.total)}"
            self._timeline.detail(message.phase, text, parent=parent)
        else:
            self._timeline.begin(message.phase, message.at, parent=parent)

    def _record_phases(self) -> None:
        for phase in self._timeline.phases():
            if phase.ended is not None and not phase.parent:
                self._recorder.record(PhaseDone(phase.name, phase.ended - phase.began))
