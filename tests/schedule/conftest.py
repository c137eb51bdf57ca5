"""A rank that keeps rows only by applying plans; its model computes from what its slots hold.

Every state is the digest of all that came before: the salt, and each token with the image row it
stands for. Before a row is computed, all it starts from must be the state of its own prefix.
"""

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from firstlight.cache.cache_options import CacheOptions
from firstlight.cache.far_pool import FarSizes
from firstlight.cache.manager import CacheManager
from firstlight.cache.paged_group import most_blocks_held
from firstlight.cache.prefix_index import PrefixChain, PrefixKey, PrefixScope
from firstlight.schedule.answers import RequestUpdate
from firstlight.schedule.request import Request, SamplingParams, SubmittedRequest
from firstlight.schedule.scheduler import Scheduler
from firstlight.schedule.settings import SchedulerSettings
from firstlight.schedule.step import (
    FailedRow,
    LostUnit,
    PromptLogprobs,
    SampledToken,
    SequenceStep,
    StateCopy,
    StepPlan,
    StepResult,
    TierReport,
    TokenLogprobs,
    UnitCopy,
)
from firstlight.sharding.state_spec import (
    GroupedQueryState,
    LatentState,
    RecurrentState,
    StateSpec,
)

VOCABULARY = 50
SPECS = (
    GroupedQueryState(kv_heads=2, head_dim=4),
    GroupedQueryState(kv_heads=1, head_dim=4, window=8),  # WINDOW
)
HYBRID = (RecurrentState(2, 4, 4, 24, 3), LatentState(8))
TWO_RECURRENT = (LatentState(8), RecurrentState(2, 4, 4, 24, 3), RecurrentState(1, 4, 4, 12, 3))
WINDOW = 8
WINDOWS = (SPECS[1], GroupedQueryState(kv_heads=2, head_dim=4, window=WINDOW))
MODELS: dict[str, tuple[StateSpec, ...]] = {
    "paged": SPECS,
    "windows": WINDOWS,
    "hybrid window": (*HYBRID, SPECS[1]),
    "hybrid": HYBRID,
    "two recurrent": TWO_RECURRENT,
}


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def origin(submitted: SubmittedRequest) -> str:
    """The state before any token. The salt is in it so that sharing across salts shows."""
    return digest(submitted.salt)


def seen(submitted: SubmittedRequest, position: int, token: int) -> tuple[object, ...]:
    """What the model sees at a position: the token, and the row of the image it stands for."""
    images = submitted.media
    found = [m for m in images if m.first <= position < m.first + m.count]
    return (token, *((m.digest, position - m.first) for m in found))


def choose(slots: list[str]) -> int:
    return int(digest(*slots), 16) % VOCABULARY


def score(slot: str, token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -int(digest(slot, token), 16) / 2**64, 0, [])


def states(submitted: SubmittedRequest, tokens: list[int]) -> list[str]:
    """The state before the first token and after each one, from the request alone."""
    found = [origin(submitted)]
    for position, token in enumerate(tokens):
        found.append(digest(found[-1], seen(submitted, position, token)))
    return found


def undisturbed(submitted: SubmittedRequest, limit: int) -> list[int]:
    """The output of this request served alone, without any cache."""
    tokens = list(submitted.prompt_ids)
    while True:
        output = tokens[len(submitted.prompt_ids) :]
        if len(output) >= submitted.params.max_tokens or (output and len(tokens) >= limit):
            return output
        if output and output[-1] in submitted.params.end_token_ids:
            return output
        tokens.append(choose(states(submitted, tokens)[1:]))


def held_alike(on_rank: list[list[int]], in_cache: list[list[int]]) -> bool:
    """Ranks go on naming blocks behind a window, of which the cache has null blocks."""
    if [len(blocks) for blocks in on_rank] != [len(blocks) for blocks in in_cache]:
        return False
    pairs = [pair for two in zip(on_rank, in_cache, strict=True) for pair in zip(*two, strict=True)]
    return all(named == held for named, held in pairs if held)


@dataclass
class RankRow:
    request_id: str
    tokens: list[int]
    num_prompt: int
    scored: bool
    blocks: list[list[int]]


@dataclass
class FarStore:
    """Copies to and from units outside the device: fetches take some steps, and a share is lost.

    What a fetch reads and writes must stay as it was until it is over.
    """

    rank: "Rank"
    chance: random.Random
    slowest: int = 0
    lost_share: float = 0.0
    pending: dict[int, tuple[int, list[tuple[UnitCopy, Any, Any]]]] = field(default_factory=dict)
    lost: list[LostUnit] = field(default_factory=list)

    def move(self, copies: list[UnitCopy]) -> None:
        for copy in copies:
            content = self.rank.get(copy.group, copy.source)
            self.rank.put(copy.group, copy.target, content)
            if "lost" in content:
                self.lost.append(LostUnit(copy.group, copy.target, "it was lost before"))
            self._may_lose(copy.group, copy.target)

    def begin(self, plan: StepPlan) -> None:
        for fetch in plan.fetches:
            read = self.rank.get
            copies = [(c, read(c.group, c.source), read(c.group, c.target)) for c in fetch.copies]
            self.pending[fetch.ticket] = (self.chance.randint(0, self.slowest), copies)

    def end_step(self) -> TierReport:
        for ticket, (left, copies) in list(self.pending.items()):
            self.pending[ticket] = (left - 1, copies)
            if left == 0:
                del self.pending[ticket]
                for copy, *before in copies:
                    self._land(copy, before)
        report = TierReport(list(self.pending), self.lost)
        self.lost = []
        return report

    def _land(self, copy: UnitCopy, before: list[Any]) -> None:
        self._may_lose(copy.group, copy.source)
        source, target = (self.rank.get(copy.group, u) for u in (copy.source, copy.target))
        if "lost" in source:
            self.lost.append(LostUnit(copy.group, copy.source, "a bit flipped"))
            return
        assert [source, target] == before, "a fetch was written to or read while under way"
        self.rank.put(copy.group, copy.target, source)

    def _may_lose(self, group: int, unit: int) -> None:
        if self.chance.random() < self.lost_share:
            self.rank.put(group, unit, ["lost"] * len(self.rank.get(group, unit)))
            self.lost.append(LostUnit(group, unit, "the disk is full"))


@dataclass
class Rank:
    """Rows as plans describe them, the slots of every block, and recurrent slots of whole states.

    `truth` is the state each prefix key stands for, with keys made anew from the requests.
    """

    submitted: dict[str, SubmittedRequest]
    block_size: int
    specs: tuple[StateSpec, ...] = SPECS
    rows: dict[int, RankRow] = field(default_factory=dict)
    slots: dict[tuple[int, int, int], str] = field(default_factory=dict)
    recurrent: dict[tuple[int, int], str] = field(default_factory=dict)
    truth: dict[PrefixKey, str] = field(default_factory=dict)
    poison: dict[str, int] = field(default_factory=dict)  # known tokens at which a request fails
    far: FarStore | None = None
    seconds: float = 1.0
    num_near: tuple[int, ...] = ()  # units of each group on the device
    num_copied: int = 0

    @property
    def paged(self) -> list[int]:
        return [g for g, spec in enumerate(self.specs) if spec.kind != "recurrent"]

    @property
    def growing(self) -> list[int]:
        return [g for g, spec in enumerate(self.specs) if spec.kind == "recurrent"]

    def run(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        for ticket in plan.recalled:
            self.far.pending.pop(ticket, None)
        for copy in plan.moves:
            self._move(copy)
        self._copy(plan.restores)
        if self.far is not None:
            self.far.begin(plan)
        result = StepResult(plan.step, [], [], [], self.seconds)
        for step in plan.steps:
            self._compute(step, result)
        self._copy(plan.saves)
        if self.far is None:
            assert not (plan.fetches or plan.recalled)
            return result
        return msgspec.structs.replace(result, tiers=self.far.end_step())

    def _move(self, copy: UnitCopy) -> None:
        if copy.target < self.num_near[copy.group]:
            self.num_copied += 1
            self.put(copy.group, copy.target, self.get(copy.group, copy.source))
        else:
            assert self.far is not None, "a copy goes where no place is"
            self.far.move([copy])

    def get(self, group: int, unit: int) -> list[str | None]:
        """What a unit holds, on the device or outside."""
        if group in self.growing:
            return [self.recurrent.get((group, unit))]
        return [self.slots.get((group, unit, offset)) for offset in range(self.block_size)]

    def put(self, group: int, unit: int, content: list[Any]) -> None:
        if group in self.growing:
            self.recurrent[group, unit] = content[0]
            return
        for offset, value in enumerate(content):
            self.slots[group, unit, offset] = value

    def _copy(self, copies: list[StateCopy]) -> None:
        """All sources are read first, as ranks do."""
        read = [self.recurrent[copy.group, copy.source] for copy in copies]
        targets = [(copy.group, copy.target) for copy in copies]
        assert len(set(targets)) == len(targets) and all(slot for _, slot in targets)
        self.recurrent.update(zip(targets, read, strict=True))

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.released:
            del self.rows[row]
        starts = {step.row: step.start for step in plan.steps}
        for new in plan.new:
            assert new.row not in self.rows, f"row {new.row} is given twice"
            start, media = starts[new.row], self.submitted[new.request_id].media
            assert list(new.media) == [m for m in media if m.first + m.count > start]
            scored = new.params.prompt_logprobs is not None
            blocks = [list(blocks) for blocks in new.blocks]
            self.rows[new.row] = RankRow(
                new.request_id, list(new.token_ids), new.num_prompt, scored, blocks
            )
        for step in plan.steps:
            row = self.rows[step.row]
            row.tokens += step.new_tokens
            for group, place, unit in step.moved:
                row.blocks[group][place] = unit
            for blocks, more in zip(row.blocks, step.new_blocks, strict=False):
                blocks += more
        live = [(g, self.rows[r].blocks[g][0]) for r in self.rows for g in self.growing]
        assert len(set(live)) == len(live), "two rows advance one slot"
        assert all(len(self.rows[r].blocks[g]) == 1 for r in self.rows for g in self.growing)

    def _compute(self, step: SequenceStep, result: StepResult) -> None:
        row, end = self.rows[step.row], step.start + step.count
        submitted = self.submitted[row.request_id]
        true = states(submitted, row.tokens)
        failing = self._reads_lost(row, step.start)
        if not failing:
            self._check_start(row, step.start, true)
        self._note_keys(submitted, row.tokens[:end], true)
        failing |= self.poison.get(row.request_id, 10**9) <= end
        for group in self.paged:
            for position in range(step.start, end):
                before = self._slot(row, group, position - 1) if position else true[0]
                value = digest(before, seen(submitted, position, row.tokens[position]))
                self.slots[self._place(row, group, position)] = "NaN" if failing else value
        for group in self.growing:
            slot = (group, row.blocks[group][0])
            state = self.recurrent[slot] if step.start else true[0]
            for position in range(step.start, end):
                state = digest(state, seen(submitted, position, row.tokens[position]))
            self.recurrent[slot] = "NaN" if failing else state
        if failing:
            result.failed.append(FailedRow(step.row, "logits are not finite"))
            return
        page = self.paged[0]
        if row.scored and step.start + 1 < row.num_prompt:
            last = min(end, row.num_prompt - 1)
            scores = [
                score(self._slot(row, page, p - 1), row.tokens[p])
                for p in range(step.start + 1, last + 1)
            ]
            result.prompt_logprobs.append(PromptLogprobs(step.row, step.start + 1, scores))
        if step.sample:
            assert end == len(row.tokens)
            first = self._first_seen(page, end)
            read = [*true[1 : first + 1], *(self._slot(row, page, p) for p in range(first, end))]
            result.tokens.append(SampledToken(step.row, choose(read), None))

    def _reads_lost(self, row: RankRow, start: int) -> bool:
        """A page read where it lies may be lost: it is told, and the row is worth nothing."""
        blocks = range(start // self.block_size)
        units = [(g, row.blocks[g][b]) for g in self.paged for b in blocks if row.blocks[g][b]]
        lost = [unit for unit in units if "lost" in self.get(*unit)]
        if self.far is not None:
            self.far.lost += [LostUnit(*unit, "a bit flipped") for unit in lost]
        return bool(lost)

    def _check_start(self, row: RankRow, start: int, true: list[str]) -> None:
        for group in self.paged:
            seen = range(self._first_seen(group, start), start)
            held = [self._slot(row, group, p) for p in seen]
            assert held == true[seen.start + 1 : start + 1], f"{row.request_id}: another's pages"
        for group in self.growing:
            held_state = self.recurrent.get((group, row.blocks[group][0]))
            assert start == 0 or held_state == true[start], f"{row.request_id}: another's state"

    def _first_seen(self, group: int, position: int) -> int:
        """The first position that the token at a position sees."""
        window = getattr(self.specs[group], "window", None)
        return 0 if window is None else max(0, position - window + 1)

    def _note_keys(self, submitted: SubmittedRequest, tokens: list[int], true: list[str]) -> None:
        scope = PrefixScope("model", self.block_size, submitted.salt)
        chain = PrefixChain(scope, tokens, submitted.media)
        for block in range(len(tokens) // self.block_size):
            state = true[(block + 1) * self.block_size]
            assert self.truth.setdefault(chain.key(block), state) == state, "one key, two contents"

    def check_findable(self, cache: CacheManager) -> None:
        """Whatever can be found is what its key says."""
        for group, held in enumerate(cache._groups):
            index: dict[PrefixKey, int] = held._index._blocks  # type: ignore[attr-defined]
            for key, unit in index.items():
                if group in self.growing:
                    assert self.recurrent[group, unit] == self.truth[key]
                else:
                    assert self.slots[group, unit, self.block_size - 1] == self.truth[key]
            if held.far is not None:
                for key, unit in held.far._index._blocks.items():
                    assert self.get(group, unit)[-1] == self.truth[key]

    def _place(self, row: RankRow, group: int, position: int) -> tuple[int, int, int]:
        return group, row.blocks[group][position // self.block_size], position % self.block_size

    def _slot(self, row: RankRow, group: int, position: int) -> str:
        return self.slots.get(self._place(row, group, position), "never written")


class Service:
    """A scheduler with its rank. Every step compares what the two know and recounts everything."""

    def __init__(
        self,
        *,
        num_blocks: int = 33,
        block_size: int = 4,
        num_slots: int = 9,
        model: str = "paged",
        turn_tokens: int = 64,
        window_spare: int | None = None,
        tiers: dict[str, Any] | None = None,
        allocator: str = "paged",
        **limits: int,
    ) -> None:
        chosen = {
            "max_sequences": 4,
            "max_batch_tokens": 16,
            "chunk_tokens": 8,
            "max_waiting": 1000,
            "context_length": 60,
        } | limits
        self.settings = SchedulerSettings(**chosen)
        specs, chunk = MODELS[model], self.settings.chunk_tokens
        window_blocks = {}
        if window_spare is not None:  # more than one request alone takes
            window_blocks[WINDOW] = 1 + most_blocks_held(WINDOW, chunk, block_size) + window_spare
        tiers = dict(tiers or {"host": 0, "disk": 0})
        far = FarSizes(tiers.pop("host"), tiers.pop("disk"))
        has_far = far.host + far.disk > 0
        self.cache = CacheManager(
            specs,
            num_blocks=num_blocks,
            block_size=block_size,
            model_digest="model",
            num_slots=num_slots,
            options=CacheOptions(
                chunk,
                window_blocks,
                turn_tokens,
                unit_bytes=(1,) * len(specs),
                far=(far,) * len(specs) if has_far else (),
                allocator=allocator,
            ),
        )
        self.scheduler = Scheduler(self.settings, self.cache)
        self.limit = min(self.settings.context_length, self.cache.max_tokens)
        self.submitted: dict[str, SubmittedRequest] = {}
        self.rank = Rank(self.submitted, block_size, specs)
        self.rank.num_near = tuple(1 + group.num_usable for group in self.cache._groups)
        if has_far:
            self.rank.seconds = tiers.pop("seconds", 1.0)
            chance = random.Random(tiers.pop("seed", 0))
            self.rank.far = FarStore(self.rank, chance, **tiers)
        self.updates: dict[str, list[RequestUpdate]] = {}
        self.pending: StepPlan | None = None
        self.num_steps = 0
        self.usage_before = self.cache.usage().groups

    def add(self, prompt: list[int], *, max_tokens: int = 4, **fields: Any) -> str:
        request_id = f"r{len(self.submitted)}"
        params = {"max_tokens": max_tokens}
        for name in ("end_token_ids", "prompt_logprobs", "min_tokens"):
            if name in fields:
                params[name] = fields.pop(name)
        submitted = SubmittedRequest(
            request_id=request_id, prompt_ids=prompt, params=SamplingParams(**params), **fields
        )
        self.submitted[request_id] = submitted
        self.updates[request_id] = []
        self.scheduler.add(submitted)
        return request_id

    def cancel(self, *request_ids: str) -> None:
        self._take(self.scheduler.cancel(request_ids))

    def begin(self) -> StepPlan | None:
        """Schedules a step and checks the plan; finish() must follow."""
        self.pending = plan = self.scheduler.schedule()
        if plan is not None:
            self.num_steps += 1
            assert plan.num_tokens <= self.settings.max_batch_tokens
            assert all(0 < step.count <= self.settings.chunk_tokens for step in plan.steps)
            first = self.scheduler._running.first
            if first is None:
                assert len(self.scheduler._incoming) and not plan.steps
            else:
                assert first.row in {step.row for step in plan.steps}
        return plan

    def finish(self) -> None:
        plan, self.pending = self.pending, None
        if plan is None:
            return
        known = self._known(plan)
        result = self.rank.run(plan)
        for step, (tokens, blocks, start) in zip(plan.steps, known, strict=True):
            row = self.rank.rows[step.row]
            if tokens is not None:
                assert (row.tokens, step.start) == (tokens, start)
                assert held_alike(row.blocks, blocks), "rank and cache hold different blocks"
        self._take(self.scheduler.update(result))
        self.scheduler.check_integrity()
        self.rank.check_findable(self.cache)
        self.check_conserved()

    def check_conserved(self) -> None:
        """What is counted of each group adds up, and no total falls."""
        usage, running = self.cache.usage(), list(self.scheduler._running)
        running += self.scheduler._incoming.requests
        page, size = self.rank.paged[0], self.rank.block_size
        room = sum(len(self.cache.blocks(r)[page]) * size - r.num_computed for r in running)
        for group, before in zip(usage.groups, self.usage_before, strict=True):
            assert group.used + group.cached + group.empty == group.usable
            assert min(group.used, group.cached, group.empty) >= 0
            assert 0 <= group.found_tokens <= group.asked_tokens
            assert group.idle.num_reused <= group.hits
            assert group.unwritten_tokens == (0 if group.kind == "recurrent" else room)
            assert 0 <= group.stranded <= group.cached + group.empty
            for place in group.far:
                assert place.held + place.cached + place.empty == place.usable
                assert min(place.held, place.cached, place.empty) >= 0
            totals = (*group.idle, group.asked_tokens, group.found_tokens, group.hits)
            earlier = (*before.idle, before.asked_tokens, before.found_tokens, before.hits)
            assert all(now >= then for now, then in zip(totals, earlier, strict=True))
        self.usage_before = usage.groups

    def step(self) -> StepPlan | None:
        plan = self.begin()
        self.finish()
        return plan

    def run(self, most_steps: int = 2000) -> None:
        """Steps until nothing is left to do."""
        while self.scheduler.has_work:
            assert self.num_steps < most_steps, "the requests do not come to an end"
            self.step()

    def output(self, request_id: str) -> list[int]:
        return [token for update in self.updates[request_id] for token in update.token_ids]

    def expected(self, request_id: str) -> list[int]:
        return undisturbed(self.submitted[request_id], self.limit)

    def request(self, request_id: str) -> Request:
        return self.scheduler._requests[request_id]

    def _known(self, plan: StepPlan) -> list[tuple[Any, Any, Any]]:
        """What the scheduler knows of each step's request; nothing once it was cancelled."""
        by_row = {request.row: request for request in self.scheduler._running}
        known: list[tuple[Any, Any, Any]] = []
        for step in plan.steps:
            request = by_row.get(step.row)
            if request is None:
                known.append((None, None, None))
            else:
                blocks = self.cache.blocks(request)
                known.append((list(request.token_ids), blocks, request.num_computed))
        return known

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            told = self.updates[update.request_id]
            assert not told or told[-1].finish is None, "an update after the last one"
            told.append(update)


@pytest.fixture
def make_service() -> type[Service]:
    return Service
