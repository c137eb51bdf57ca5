"""Owns a plan while it is made, and whose each of its steps is; takes no decision."""

from collections.abc import Iterable

import msgspec

from firstlight.cache.cache_group import SlotCopy
from firstlight.cache.manager import CacheManager
from firstlight.cache.moves import UnitMove
from firstlight.schedule.request import Request
from firstlight.schedule.step import (
    Fetch,
    NewSequence,
    SequenceStep,
    StateCopy,
    StepPlan,
    UnitCopy,
)


class StepDraft:
    """Collects what the next plan computes; `budget` is how many tokens it still may.

    `is_contested` is set when a running request did not get the blocks it needs: then nobody is
    admitted.
    """

    def __init__(self, number: int, *, budget: int) -> None:
        self.number = number
        self.budget = budget
        self.is_contested = False
        self.steps: dict[Request, SequenceStep] = {}
        self._new: list[NewSequence] = []
        self._moves: list[UnitCopy] = []
        self._fetches: list[Fetch] = []
        self._recalled: list[int] = []

    def add(
        self,
        request: Request,
        count: int,
        new_blocks: list[list[int]],
        moved: list[tuple[int, int, int]] | None = None,
    ) -> None:
        """Computes `count` more tokens of a request whose row the ranks hold."""
        assert request.row is not None, f"{request.request_id} has no row"
        start, num_known = request.num_computed, len(request.token_ids)
        sample = start + count == num_known and request.params.max_tokens > 0
        new_tokens = request.token_ids[request.num_sent :]
        self.steps[request] = SequenceStep(
            request.row, start, count, sample, new_tokens, new_blocks, moved or []
        )
        request.num_sent = num_known
        self.budget -= count

    def add_new(self, request: Request, count: int, blocks: list[list[int]]) -> None:
        """Hands a sequence to the ranks whole; computes `count` tokens behind the cached ones."""
        assert request.row is not None, f"{request.request_id} has no row"
        tokens = list(request.token_ids)
        self._new.append(
            NewSequence(
                request.row,
                request.request_id,
                tokens,
                request.num_prompt,
                request.params,
                blocks,
                tuple(m for m in request.media if m.first + m.count > request.num_computed),
            )
        )
        request.num_sent = len(tokens)
        self.add(request, count, [])

    def note_renumbered(self, cache: CacheManager) -> None:
        """Corrects what was planned before blocks moved to make room for what was planned later."""
        moves = cache.tiers.moves
        for request in [r for r in self.steps if r.request_id in moves.renumbered]:
            moved = moves.take_renumbered(request.request_id)
            self._renumber(request, moved, cache.blocks(request))

    def remove(self, request: Request) -> None:
        """Takes back what was added for a request that is preempted after all."""
        step = self.steps.pop(request, None)
        if step is not None:
            self.budget += step.count

    def move(self, moves: Iterable[UnitMove], *, fetches: list[Fetch], recalled: list[int]) -> None:
        """Moves state between the device and what lies beyond it."""
        self._moves = [UnitCopy(*move) for move in moves]
        self._fetches, self._recalled = fetches, recalled

    def to_plan(
        self,
        released: list[int],
        *,
        restores: Iterable[SlotCopy] = (),
        saves: Iterable[SlotCopy] = (),
    ) -> StepPlan:
        """The record for the ranks."""
        return StepPlan(
            self.number,
            self._new,
            list(self.steps.values()),
            released,
            restores=[StateCopy(*copy) for copy in restores],
            saves=[StateCopy(*copy) for copy in saves],
            moves=self._moves,
            fetches=self._fetches,
            recalled=self._recalled,
        )

    def _renumber(
        self, request: Request, moved: list[tuple[int, int, int]], blocks: list[list[int]]
    ) -> None:
        step = self.steps[request]
        self._new = [
            msgspec.structs.replace(new, blocks=blocks) if new.row == step.row else new
            for new in self._new
        ]
        if any(new.row == step.row for new in self._new):
            return
        known = [len(held) for held in blocks]
        fresh = [list(new) for new in step.new_blocks]
        for group, new in enumerate(fresh):
            known[group] -= len(new)
            new[:] = blocks[group][known[group] :]
        places = {(g, place): unit for g, place, unit in (*step.moved, *moved)}
        kept = [(g, place, unit) for (g, place), unit in places.items() if place < known[g]]
        self.steps[request] = msgspec.structs.replace(step, new_blocks=fresh, moved=kept)
