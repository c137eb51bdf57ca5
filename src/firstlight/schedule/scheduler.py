"""Owns which request computes how many tokens in each step, and when it starts, yields and ends.

Knows no tensor and no transport: it makes StepPlans, reads StepResults, asks the cache for blocks.

There is no prefill and no decode. In each step the computed tokens of a request catch up with its
known tokens; when they have, one token is sampled. The step's token budget goes, in this order, to

 1. requests one token behind (answers being written): a prompt never stalls them;
 2. running prompts, at most `chunk_tokens` each: the first of all running requests, then those with
    fewest tokens left, so that a short prompt does not queue behind long ones. While somebody can
    be admitted, up to half of what 1. left, one chunk at most, is kept for 3.: newcomers share the
    step with long prompts instead of waiting for their end;
 3. waiting requests by (priority, arrival), the first that must wait holding back those behind it.

While there are requests of 1., those of 2. and 3. get at most `prompt_share` of a step together:
less of it writes answers more evenly and makes prompts wait longer.

A request that gets no block preempts the last of the running requests by (priority, arrival), or
stands still if that is itself. The first one can thus take every block, add() refuses what does not
fit alone, and budgets hold a token per sequence: the first request advances in every step, so each
one finishes. Priority decides who starts and who yields; nobody is stopped for a waiting request.
"""

from collections.abc import Iterable

from firstlight.cache.cache_group import BlockCounts, SlotCopy
from firstlight.cache.manager import CacheManager
from firstlight.schedule.admission import Entrance, Hold, Room, find_hold, find_refusal
from firstlight.schedule.answers import Answers, RequestUpdate, find_finish, last_update
from firstlight.schedule.request import FinishReason, Request, RequestState, SubmittedRequest
from firstlight.schedule.request_order import RequestOrder, split_running
from firstlight.schedule.row_table import RowTable
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import (
    SequenceStep,
    StepPlan,
    StepResult,
)
from firstlight.schedule.step_draft import StepDraft
from firstlight.schedule.tally import SchedulerCounts, Tally
from firstlight.schedule.tier_policy import TierPolicy

LOST_AGAIN = "its cached state was lost on the way to or from host memory or disk, again and again"


class Scheduler:
    """Requests from their submission to their end; one thread calls schedule, update, schedule...

    add() and cancel() may come between any two calls, a plan being under way or not.
    """

    def __init__(self, settings: SchedulerSettings, cache: CacheManager) -> None:
        self._settings = settings
        self._cache = cache
        self._most_tokens = min(settings.context_length, cache.max_tokens)
        self._waiting = RequestOrder()
        self._running = RequestOrder()
        self._requests: dict[str, Request] = {}
        self._rows = RowTable(settings.max_sequences)
        self._tally = Tally()
        self._tiers = TierPolicy(cache, self._tally)
        self._incoming = self._tiers.incoming
        self._num_steps = 0
        self._under_way: StepDraft | None = None

    @property
    def has_work(self) -> bool:
        """Whether schedule() would return a plan."""
        return bool(self._requests)

    @property
    def counts(self) -> SchedulerCounts:
        """Counters and gauges, which add up at any moment."""
        waiting = len(self._waiting) + len(self._incoming)
        return self._tally.counts(waiting=waiting, running=len(self._running))

    def add(self, submitted: SubmittedRequest) -> None:
        """Queues a request. Raises RequestError with a RefusalCode and then keeps nothing."""
        self._tally.received += 1
        entrance = Entrance(
            self._settings,
            self._cache.max_tokens,
            len(self._waiting),
            submitted.request_id in self._requests,
        )
        refusal = find_refusal(submitted, entrance)
        if refusal is not None:
            self._tally.refused[refusal.code.value] += 1
            raise refusal.to_error()
        request = Request(submitted, arrival=self._tally.received)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def cancel(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """Ends requests at once and returns their last updates; unknown ids are ignored.

        A step under way may still compute them: its answers for them are dropped.
        """
        found = [self._requests[key] for key in dict.fromkeys(request_ids) if key in self._requests]
        for request in found:
            self._finish(request, FinishReason.CANCELLED)
        return [last_update(request, FinishReason.CANCELLED) for request in found]

    def fail_all(self, reason: str) -> list[RequestUpdate]:
        """Ends every request with an error: nothing that was computed of them can be trusted."""
        return [self._fail(request, reason) for request in list(self._requests.values())]

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do. After a step comes update().

        Rows released while nothing is left to do are named in the first plan after.
        """
        assert self._under_way is None, "schedule is called while a step is under way"
        if not self._requests:
            return None
        self._num_steps += 1
        draft = StepDraft(self._num_steps, budget=self._settings.max_batch_tokens)
        answering, prompts = split_running(self._running)
        for request in answering:
            self._advance(request, draft)
        if answering:
            draft.budget = min(draft.budget, self._settings.prompt_tokens_beside_answers)
        kept = self._tokens_kept_for_newcomer(draft, prompts)
        draft.budget -= kept
        for request in prompts:
            self._advance(request, draft)
        draft.budget += kept
        self._admit(draft, prompts)
        assert draft.steps or len(self._incoming), "there are requests and none advances"
        self._under_way = draft
        saves = self._make_snapshots(draft)
        fetches, recalled = self._incoming.take_orders()
        draft.note_renumbered(self._cache)
        copies = self._cache.tiers.moves.take_copies()
        draft.move(copies, fetches=fetches, recalled=recalled)
        return draft.to_plan(
            self._rows.take_released(),
            restores=self._cache.take_restores(),
            saves=saves,
        )

    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Takes in what the step under way computed; returns what is new, request by request.

        A failed row ends its request with an error, and none of its blocks is found again.
        """
        draft, self._under_way = self._under_way, None
        assert draft is not None and draft.number == result.step, "a result of no step under way"
        updates = self._take_report(result, draft)
        answers = Answers(result)
        for request, step in draft.steps.items():
            if request.state is not RequestState.RUNNING:
                continue  # cancelled while the step was under way
            update = self._settle(request, step, answers)
            if update is not None:
                updates.append(update)
        return updates

    def _take_report(self, result: StepResult, draft: StepDraft) -> list[RequestUpdate]:
        """Puts back who lost state outside the device; ends who loses it ever again."""
        updates: list[RequestUpdate] = []
        num_tokens = sum(step.count for step in draft.steps.values())
        for request in self._tiers.take(result, num_tokens, self._running):
            if request.state is not RequestState.RUNNING:
                self._waiting.add(request)
            elif request.shuns_tiers:
                updates.append(self._fail(request, LOST_AGAIN))
            else:
                self._put_back(request)  # its state is as wrong as what this step computed
        return updates

    def check_integrity(self) -> None:
        """Recounts rows, blocks, orders and counters; for tests and idle moments."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        self._cache.check_integrity()
        running, arriving = list(self._running), self._incoming.requests
        waiting = [*self._waiting, *arriving]
        self._tally.check_integrity(waiting=len(waiting), running=len(running))
        assert {*waiting, *running} == set(self._requests.values()), "a request is in no queue"
        assert all(request.row is None for request in waiting), "a waiting request has a row"
        self._rows.check_integrity([request.row for request in running if request.row is not None])
        holding = len(running) + len(arriving)
        assert self._cache.usage().num_requests == holding, "blocks are held by no running one"

    def _advance(self, request: Request, draft: StepDraft) -> None:
        """Plans as many of its tokens as chunk and budget allow, if it gets the blocks for them."""
        if draft.budget < 1 or request.state is not RequestState.RUNNING:
            return  # the budget is spent, or it was preempted in this very step
        count = self._count(request, draft)
        num_tokens = request.num_computed + count
        self._tiers.make_room(request, num_tokens, others_wait=len(self._waiting) > 0)
        blocks = self._cache.grow(request, num_tokens)
        if blocks is None:
            draft.is_contested = True
            blocks = self._grow_by_preempting(request, num_tokens, draft)
        if blocks is not None:
            moved = self._cache.tiers.moves.take_renumbered(request.request_id)
            draft.add(request, count, blocks, moved)

    def _count(self, request: Request, draft: StepDraft) -> int:
        """Pending tokens within chunk and budget, but none beyond the point of a snapshot."""
        pending = len(request.token_ids) - request.num_computed
        point = self._cache.snapshot_point(request)
        if point is not None:
            pending = point - request.num_computed
        at_once = self._cache.most_at_once(request)
        return min(pending, self._settings.chunk_tokens, draft.budget, at_once)

    def _make_snapshots(self, draft: StepDraft) -> list[SlotCopy]:
        """Keeps the recurrent state of requests that this step brings to their snapshot point.

        Last of all, so that no snapshot takes the slot of a newcomer or of one that yields.
        """
        steps, save = draft.steps.items(), self._cache.save
        return [copy for request, s in steps for copy in save(request, s.start + s.count)]

    def _grow_by_preempting(
        self, request: Request, num_tokens: int, draft: StepDraft
    ) -> list[list[int]] | None:
        """Takes back the blocks of requests that have not started, then preempts from the end of
        the running order, until the blocks suffice or it is last.
        """
        blocks = None
        while blocks is None:
            if len(self._incoming):
                self._recall(self._incoming.requests[-1])
                blocks = self._cache.grow(request, num_tokens)
                continue
            victim = self._running.last
            assert victim is not None, f"{request.request_id} is not running"
            if victim is request:
                is_alone = request is self._running.first
                can_grow = is_alone and self._cache.spill(request, num_tokens)
                return self._cache.grow(request, num_tokens) if can_grow else None
            draft.remove(victim)
            self._preempt(victim)
            blocks = self._cache.grow(request, num_tokens)
        return blocks

    def _preempt(self, request: Request) -> None:
        """Puts a running request back into the queue; what it computed may still be cached then,
        and goes out of the device whole if bringing it back is the quicker way.
        """
        self._tiers.park(request)
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        self._stop(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self._tally.preemptions += 1
        self._waiting.add(request)

    def _tokens_kept_for_newcomer(self, draft: StepDraft, prompts: list[Request]) -> int:
        arrived = self._incoming.arrived
        newcomer = arrived[0] if arrived else self._waiting.first
        if newcomer is None or not prompts:
            return 0
        reserved = self._reserved_blocks(prompts)
        if not arrived and self._find_hold(newcomer, draft, reserved) is not None:
            return 0
        return min(newcomer.num_pending, self._settings.chunk_tokens, draft.budget // 2)

    def _admit(self, draft: StepDraft, prompts: list[Request]) -> None:
        """Starts waiting requests in order until one has to wait, and notes why it has to."""
        self._tally.held_back = None
        if len(self._incoming):
            self._start_arrived(draft)
        reserved = self._reserved_blocks(prompts)
        while (request := self._waiting.first) is not None:
            hold = self._find_hold(request, draft, reserved)
            if hold is not None:
                self._tally.held_back = hold.value
                return
            self._start(request, draft)
            reserved = reserved.plus(self._cache.needs(request, request.num_known), each=1)

    def _find_hold(self, request: Request, draft: StepDraft, reserved: BlockCounts) -> Hold | None:
        free_blocks, num_rows = self._cache.free_blocks, self._rows.num_free - len(self._incoming)
        room = Room(num_rows, draft.budget, free_blocks, reserved, draft.is_contested)
        return find_hold(request, room, self._cache, self._tiers.lookup)

    def _reserved_blocks(self, prompts: list[Request]) -> BlockCounts:
        """Blocks that running prompts still need, and one for each running request to write on.

        Without them a newcomer would take the blocks of half-computed prompts and be preempted for
        it.
        """
        num_groups, arriving = len(self._cache.free_blocks.by_group), self._incoming.requests
        reserved = BlockCounts((len(self._running) + len(arriving),) * num_groups)
        for request in (*prompts, *arriving):
            reserved = reserved.plus(self._cache.needs(request, request.num_known))
        return reserved

    def _start(self, request: Request, draft: StepDraft) -> None:
        """Gives a waiting request row and blocks; plans its first tokens behind the cached ones. If
        some of those lie outside the device they are ordered, and it starts when they are there.
        """
        self._waiting.remove(request)
        request.num_computed = self._tiers.lookup(request)
        if not self._tiers.stage(request):
            has_begun = self._begin(request, draft)
            assert has_begun, f"{request.request_id} was admitted without blocks"

    def _begin(self, request: Request, draft: StepDraft) -> bool:
        """Hands a request to the ranks; False, and nothing taken, without blocks for its tokens."""
        count = self._count(request, draft)
        num_tokens = request.num_computed + count
        if self._cache.grow(request, num_tokens) is None:
            is_alone = not len(self._running) and self._incoming.requests in ([], [request])
            if not is_alone or not self._cache.spill(request, num_tokens):
                return False
            self._cache.grow(request, num_tokens)
        self._cache.tiers.moves.take_renumbered(request.request_id)
        self._tally.start(request)
        request.row = self._rows.take()
        request.state = RequestState.RUNNING
        self._running.add(request)
        draft.add_new(request, count, self._cache.blocks(request))
        return True

    def _start_arrived(self, draft: StepDraft) -> None:
        """Starts requests whose state has come. If none runs and blocks are short, others of them
        yield.
        """
        for request in self._incoming.arrived:
            if draft.budget < 1 or draft.is_contested:
                return
            if request not in self._incoming:
                continue
            while not self._begin(request, draft):
                others = [other for other in self._incoming.requests if other is not request]
                if len(self._running) or not others:
                    return
                self._recall(others[-1])
            self._incoming.remove(request)

    def _recall(self, request: Request) -> None:
        """Puts a request whose state is on its way back into the queue."""
        self._tiers.recall(request)
        self._waiting.add(request)

    def _settle(
        self, request: Request, step: SequenceStep, answers: Answers
    ) -> RequestUpdate | None:
        """Takes in one row's answer; None when there is nothing to tell."""
        if step.row in answers.failed:
            return self._fail(request, answers.failed[step.row])
        request.num_computed = step.start + step.count
        self._tally.computed_tokens += step.count
        self._cache.commit(request, request.num_computed)
        token = answers.tokens.get(step.row) if step.sample else None
        if step.sample and token is None:
            return self._fail(request, "the ranks returned no token for it; this is a bug")
        scores = answers.take_scores(request, step.row)
        if token is not None:
            request.token_ids.append(token.token_id)
            self._tally.output_tokens += 1
        finish = find_finish(request, token, self._most_tokens)
        if token is None and scores is None and finish is None:
            return None
        if finish is not None:
            self._finish(request, finish)
        return RequestUpdate(
            request_id=request.request_id,
            token_ids=[] if token is None else [token.token_id],
            logprobs=None if token is None or token.logprobs is None else [token.logprobs],
            prompt_logprobs=scores,
            finish=finish,
            num_cached=request.num_cached,
        )

    def _fail(self, request: Request, reason: str) -> RequestUpdate:
        self._cache.discard(request)
        self._finish(request, FinishReason.ERROR)
        return last_update(request, FinishReason.ERROR, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a waiting or running request and gives back everything it holds."""
        if request.state is RequestState.RUNNING:
            self._stop(request)
        elif request.state is RequestState.ARRIVING:
            self._tiers.recall(request)
        else:
            self._waiting.remove(request)
        self._cache.tiers.drop(request.request_id)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        self._tally.finished[reason] += 1

    def _stop(self, request: Request) -> None:
        """Takes a running request off the ranks."""
        assert request.row is not None, f"{request.request_id} runs without a row"
        self._running.remove(request)
        self._cache.release(request)
        self._rows.give_back(request.row)
        request.row = None
        request.num_computed = request.num_sent = 0
