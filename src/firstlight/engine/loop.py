"""Owns the engine's one loop: take messages, schedule, run, update, answer. Takes no policy
decision.

Liveness does not depend on it: the heartbeat is sent by a thread of its own from shared counters.
"""

import gc
import time
from collections.abc import Callable, Sequence

import msgspec

from firstlight.cache.cache_group import GroupUsage
from firstlight.engine.constraints import Constraints
from firstlight.engine.idle_check import IdleCheck
from firstlight.engine.messages import (
    Cancel,
    CheckWeights,
    Drain,
    FromEngine,
    Output,
    Outputs,
    ReloadWeights,
    Score,
    Submit,
    ToEngine,
    WeightsReloaded,
)
from firstlight.engine.ranks import RankFailure
from firstlight.engine.startup import Running
from firstlight.engine.tier_metrics import record_moves, record_tiers
from firstlight.errors import BadInput, FirstlightError, RequestError
from firstlight.metrics.events import (
    CacheGroupState,
    CacheState,
    NanRows,
    Preempted,
    PrefixLookup,
    ProcessMemory,
    QueueState,
    Recorder,
    RequestStarted,
    SlotState,
    StepDone,
    WeightsStreamed,
)
from firstlight.runner import protocol
from firstlight.schedule.answers import RequestUpdate
from firstlight.schedule.request import FinishReason, SubmittedRequest
from firstlight.schedule.step import NO_TOKEN_LEFT, StepPlan, StepResult

RECEIVE_SECONDS = 0.1
# How often a loop with nothing else to do looks whether a grammar is compiled.
COMPILE_SECONDS = 0.002


class EngineLoop:
    """Serves requests on a running engine until it is drained.

    `constraints` holds the requests' grammars. `receive(wait_seconds)` gives the next message from
    the API process or None; `send` answers it; `advanced` is called after every step. `reload` puts
    weights of a source (None: their own) in the place of those that are there.
    """

    def __init__(
        self,
        running: Running,
        recorder: Recorder,
        *,
        constraints: Constraints,
        receive: Callable[[float], ToEngine | None],
        send: Callable[[FromEngine], None],
        advanced: Callable[[], None],
        reload: Callable[[str | None], None] | None = None,
    ) -> None:
        self._running = running
        self._recorder = recorder
        self._constraints = constraints
        self._receive = receive
        self._send = send
        self._advanced = advanced
        self._reload = reload
        self._draining = False
        self._to_reload: ReloadWeights | None = None
        self._unhealthy: str | None = None
        self._submitted_at: dict[str, float] = {}
        self._preemptions = 0
        self._books = IdleCheck(running.scheduler, recorder)

    @property
    def busy(self) -> bool:
        """Says whether there are unfinished requests, or weights to be reloaded."""
        return self._running.scheduler.has_work or self._to_reload is not None

    @property
    def is_reloading(self) -> bool:
        """Says whether no request is taken because weights are replaced."""
        return self._to_reload is not None

    @property
    def unhealthy(self) -> str | None:
        """Why no request is served until weights were reloaded; None when all is well."""
        return self._unhealthy

    @property
    def _is_done(self) -> bool:
        return self._draining and not self.busy and not self._constraints.num_pending

    def serve(self) -> None:
        """Runs until a Drain has arrived and the last request has finished."""
        gc.freeze()  # what start-up made lives on; steps should not look at it again and again
        self._record_state()
        while not self._is_done:
            self._take_messages()
            self._admit_prepared()
            if not self._running.scheduler.has_work:
                self._running.ranks.check_alive()
                self._unhealthy = self._books.turn() or self._unhealthy
                self._replace_weights()
            self._step()
            self._check_weights()

    def _take_messages(self) -> None:
        """Takes all messages that are there; waits a moment only when there is nothing to run."""
        idle_seconds = COMPILE_SECONDS if self._constraints.num_pending else RECEIVE_SECONDS
        guard = self._running.guard
        wait = 0.0 if self.busy or (guard is not None and guard.is_asked) else idle_seconds
        while (message := self._receive(wait)) is not None:
            wait = 0.0
            if isinstance(message, Submit):
                self._submit(message.requests)
            elif isinstance(message, Cancel):
                self._cancel(message.request_ids)
            elif isinstance(message, Drain):
                self._draining = True
            elif isinstance(message, CheckWeights):
                if guard is not None:
                    guard.ask(message.check_id)
            elif self._to_reload is None:
                self._to_reload = message
            else:
                problem = "weights are being reloaded already"
                self._send(WeightsReloaded(message.reload_id, problem=problem, refusal="reloading"))

    def _submit(self, requests: Sequence[SubmittedRequest]) -> None:
        refused: list[Output] = []
        for request in requests:
            try:
                self._check_open()
                if request.params.grammar:
                    self._constraints.prepare(request)
                else:
                    self._add(request)
            except RequestError as error:
                refused.append(_refusal(request, error))
        if refused:
            self._send(Outputs(refused))

    def _check_open(self) -> None:
        """Raises RequestError when no request is taken now."""
        if self._draining:
            raise RequestError("the service is shutting down", code="draining")
        if self._unhealthy is not None:
            raise RequestError(self._unhealthy, code="unhealthy")
        if self._to_reload is not None:
            raise RequestError("the weights are being reloaded; try again soon", code="reloading")

    def _add(self, request: SubmittedRequest) -> None:
        if self._unhealthy is not None:
            raise RequestError(self._unhealthy, code="unhealthy")
        self._running.scheduler.add(request)
        self._submitted_at[request.request_id] = time.monotonic()

    def _admit_prepared(self) -> None:
        """Queues requests whose grammar is compiled, and refuses those whose grammar is none."""
        refused: list[Output] = []
        for request, constraint, error in self._constraints.take_prepared():
            try:
                if constraint is None:
                    raise error or RequestError("the grammar was not compiled")
                self._add(request)
                self._constraints.hold(request.request_id, constraint)
            except RequestError as refusal:
                refused.append(_refusal(request, refusal))
        if refused:
            self._send(Outputs(refused))

    def _cancel(self, request_ids: Sequence[str]) -> None:
        withdrawn = self._constraints.withdraw(request_ids)
        gone = [RequestUpdate(request_id=key, finish=FinishReason.CANCELLED) for key in withdrawn]
        self._answer([*gone, *self._running.scheduler.cancel(request_ids)])
        self._record_state()  # no step may follow

    def _check_weights(self) -> None:
        """Reads what weights are due. What was computed with damaged ones is worth nothing: every
        request ends with the reason, and none is taken until weights were reloaded."""
        guard = self._running.guard
        if guard is None:
            return
        known = len(guard.damages)
        for report in guard.turn(busy=self._running.scheduler.has_work):
            self._send(report)
            self._advanced()
        if len(guard.damages) > known:
            self._unhealthy = guard.problem
            self._answer(self._running.scheduler.fail_all(guard.problem or ""))
            self._record_state()

    def _replace_weights(self) -> None:
        """Reloads weights if that was asked; nothing runs now."""
        order = self._to_reload
        if order is None or self._constraints.num_pending:
            return
        answer = self._reloaded(order)
        self._to_reload = None
        self._send(answer)

    def _reloaded(self, order: ReloadWeights) -> WeightsReloaded:
        began, facts = time.monotonic(), self._running.facts
        if self._reload is None or self._draining:
            problem = "the service is shutting down"
            return WeightsReloaded(order.reload_id, problem=problem, refusal="draining")
        problem = ""
        try:
            self._reload(order.source)
            self._unhealthy = self._books.recount()
            self._record_state()
        except BadInput as error:  # nothing was touched
            return WeightsReloaded(order.reload_id, problem=str(error), refusal="bad_source")
        except RankFailure:
            raise
        except FirstlightError as error:
            problem = self._unhealthy = str(error)
            self._running.scheduler.fail_all(problem)  # what the gate had asked
        return WeightsReloaded(
            order.reload_id,
            source_digest=str(facts["source_digest"]),
            known_answers=str(facts["known_answers"]),
            seconds=time.monotonic() - began,
            problem=problem,
        )

    def _step(self) -> None:
        scheduler, ranks = self._running.scheduler, self._running.ranks
        plan = scheduler.schedule()
        if plan is None:
            return
        plan = self._constraints.masked(plan)
        self._record_starts(plan)
        began = time.perf_counter()
        ranks.send(protocol.RunStep(plan))
        done = ranks.collect(protocol.StepDone, on_progress=lambda _: self._advanced())
        if self._running.audit is not None:
            self._running.audit.step(plan, done, self._running.cache.usage)
        result = protocol.joint_result(done)
        updates = scheduler.update(result)
        self._answer(updates)
        self._advanced()
        self._record(plan, result, time.perf_counter() - began)
        for report in done:
            rank = f"rank {report.rank}"
            self._recorder.record(ProcessMemory(rank, report.resident_bytes))
            if report.traffic is not None:
                moved = msgspec.structs.asdict(report.traffic)
                self._recorder.record(WeightsStreamed(rank=report.rank, **moved))

    def _answer(self, updates: Sequence[RequestUpdate]) -> None:
        if updates:
            followed = self._constraints.follow(updates)
            self._send(Outputs([_to_output(update) for update in followed]))
        for update in updates:
            if update.finish is not None:
                self._submitted_at.pop(update.request_id, None)

    def _record(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        record, scheduler = self._recorder.record, self._running.scheduler
        steps = {step.row: step for step in plan.steps}
        for sequence in plan.new:
            hit = steps[sequence.row].start
            record(PrefixLookup(num_tokens=len(sequence.token_ids), num_hit=hit))
        counts = scheduler.counts
        for _ in range(counts.preemptions - self._preemptions):
            record(Preempted())
        self._preemptions = counts.preemptions
        num_failed = sum(row.reason != NO_TOKEN_LEFT for row in result.failed)
        if num_failed:
            record(NanRows(num_rows=num_failed))
        record_moves(self._recorder, result)
        if plan.steps:
            num_tokens, num_requests = plan.num_tokens, len(plan.steps)
            record(StepDone(seconds=seconds, num_tokens=num_tokens, num_requests=num_requests))
        self._record_state()

    def _record_starts(self, plan: StepPlan) -> None:
        """Notes the first step of each request; one that comes back after a preemption had its."""
        now = time.monotonic()
        for sequence in plan.new:
            submitted = self._submitted_at.pop(sequence.request_id, None)
            if submitted is not None:
                self._recorder.record(RequestStarted(queue_seconds=now - submitted))

    def _record_state(self) -> None:
        """Records how many requests there are and how full the caches are."""
        counts = self._running.scheduler.counts
        self._recorder.record(QueueState(num_waiting=counts.waiting, num_running=counts.running))
        usage = self._running.cache.usage()
        self._record_pool("kv", usage.used_share, "kv_bytes_per_rank")
        for index, group in enumerate(usage.groups):
            self._recorder.record(_group_state(index, group))
        record_tiers(self._recorder, usage, counts)
        slots = usage.slots
        if slots is not None:
            self._record_pool("recurrent", slots.used / slots.usable, "recurrent_bytes_per_rank")
            self._recorder.record(
                SlotState(
                    num_live=slots.used,
                    num_snapshots=slots.cached,
                    num_empty=slots.empty,
                    num_hits=slots.hits,
                    num_evictions=slots.evictions,
                )
            )

    def _record_pool(self, pool: str, used_share: float, fact: str) -> None:
        total = int(self._running.facts[fact])
        self._recorder.record(
            CacheState(pool=pool, used_bytes=int(used_share * total), total_bytes=total)
        )


def _group_state(index: int, group: GroupUsage) -> CacheGroupState:
    idle = group.idle
    return CacheGroupState(
        group=f"{index}-{group.kind}",
        used_bytes=group.used * group.unit_bytes,
        cached_bytes=group.cached * group.unit_bytes,
        empty_bytes=group.empty * group.unit_bytes,
        stranded_bytes=group.stranded * group.unit_bytes,
        unwritten_tokens=group.unwritten_tokens,
        longest_run_bytes=group.longest_run * group.unit_bytes,
        copied_bytes=group.copied * group.unit_bytes,
        asked_tokens=group.asked_tokens,
        found_tokens=group.found_tokens,
        num_reused=idle.num_reused,
        reused_seconds=idle.reused_seconds,
        num_evicted=idle.num_evicted,
        evicted_seconds=idle.evicted_seconds,
    )


def _refusal(request: SubmittedRequest, error: RequestError) -> Output:
    return Output(
        request.request_id,
        error=str(error),
        refusal=error.code or "refused",
        parameter=error.parameter,
    )


def _to_output(update: RequestUpdate) -> Output:
    scores = update.prompt_logprobs
    return Output(
        update.request_id,
        token_ids=update.token_ids,
        logprobs=update.logprobs,
        prompt_logprobs=Score(scores.first, scores.tokens) if scores is not None else None,
        finish=update.finish,
        error=update.error,
        num_cached=update.num_cached,
    )
