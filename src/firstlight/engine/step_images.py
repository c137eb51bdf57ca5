"""Owns which images a step computes the first tokens of, by what the engine tells its ranks.

Knows no features: sizes alone are kept, never pixels.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from firstlight.schedule.step import StepPlan


class StepImage(NamedTuple):
    """An image as a rank encodes it; it stands at tokens [first, first + num_tokens)."""

    first: int
    num_tokens: int
    num_patches: int
    digest: str


class StepImages:
    """The images of sequences that run, until a step has reached them."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[StepImage]] = {}

    def reached(self, plan: StepPlan) -> list[StepImage]:
        """Returns the images of which this step computes tokens and no step before it did."""
        for row in plan.released:
            self._waiting.pop(row, None)
        for new in plan.new:
            self._waiting.pop(new.row, None)
            if new.media:
                self._waiting[new.row] = [
                    StepImage(one.first, one.count, prod(one.grid), one.digest) for one in new.media
                ]
        if not self._waiting:
            return []
        taken = (self._take(step.row, step.start, step.count) for step in plan.steps)
        return [image for images in taken for image in images]

    def _take(self, row: int, start: int, count: int) -> list[StepImage]:
        """Takes what lies before the end of a step; what lies before its start was found."""
        waiting = self._waiting.get(row)
        if not waiting:
            return []
        here = [one for one in waiting if one.first < start + count]
        left = [one for one in waiting if one.first >= start + count]
        if left:
            self._waiting[row] = left
        else:
            del self._waiting[row]
        return [one for one in here if one.first + one.num_tokens > start]
