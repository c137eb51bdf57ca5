"""Owns what a rank's steps take beside what lasts: the peak above the state at rest.

Knows no plan of memory. On a host it is resident memory, whose high mark the system lets a process
lower; steps that score prompts are left out, for their logits are none a plan counts.

A host's resident memory comes in pages and arenas, and a heap keeps holes: there the tensors of a
step are counted as operations make them, beside what the process held.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from firstlight.metrics.series import resident_bytes
from firstlight.runner.live_tensors import LiveTensors
from firstlight.runner.memory import RankDevice
from firstlight.schedule.step import StepPlan

_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
_RESET_HIGH_MARK = "5"
_TIMES = 3


@dataclass(frozen=True)
class StepMemory:
    """What was measured of one step, 0 for what was not: `tensor_bytes` above what is held between
    steps, `peak_bytes` of the whole process (of the device, where it has its own memory)."""

    tensor_bytes: int = 0
    peak_bytes: int = 0


class PeakMemory:
    """Measures steps of as many tokens as any before, a few times each; others cost nothing.

    `held_bytes` are what the rank's tensors keep for good: weights and caches.
    """

    def __init__(self, place: RankDevice, device: torch.device, held_bytes: int) -> None:
        self._place = place
        self._device = device
        self._most_tokens = 0
        self._times = 0
        self._scoring: set[int] = set()
        self._is_measured = False
        self._live: LiveTensors | None = None
        self._rest = held_bytes
        if not place.owned:
            _return_free_memory()
            self._rest = resident_bytes()

    @property
    def rest_bytes(self) -> int:
        """What is held before a step: by tensors on a device of its own, by the process on a
        host."""
        return self._rest

    def before(self, plan: StepPlan) -> None:
        """Looks at a step that is about to run."""
        self._scoring -= set(plan.released)
        self._scoring |= {s.row for s in plan.new if s.params.prompt_logprobs is not None}
        scores = any(step.row in self._scoring for step in plan.steps)
        self._is_measured = not scores and self._is_worth(plan.num_tokens) and self._lower_mark()

    def after(self) -> StepMemory:
        """Returns what the step took at its peak."""
        if not self._is_measured:
            return StepMemory()
        if self._place.owned:
            peak = self._place.peak_bytes()
            return StepMemory(max(0, peak - self._rest), peak)
        assert self._live is not None, "a step of a host is measured whose tensors nobody counted"
        self._live.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        peak, tensors = _high_mark(), self._live.peak_bytes
        _return_free_memory()
        # Blocks written for the first time stay: they are no part of the step.
        self._rest = resident_bytes()
        return StepMemory(tensors, peak)

    def _is_worth(self, num_tokens: int) -> bool:
        """The first step of a size also pays for what libraries set up once."""
        if num_tokens > self._most_tokens:
            self._most_tokens, self._times = num_tokens, 0
        self._times += 1
        return num_tokens == self._most_tokens and self._times <= _TIMES

    def _lower_mark(self) -> bool:
        if self._place.owned:
            with suppress(RuntimeError, AttributeError):  # without it the mark is that of the start
                torch.get_device_module(self._device).reset_peak_memory_stats(self._device)
            return True
        _return_free_memory()  # or what an earlier step gave back would still count
        try:
            with open(_CLEAR, "w", encoding="ascii") as file:
                file.write(_RESET_HIGH_MARK)
        except OSError:
            return False
        if not resident_bytes():
            return False
        self._live = LiveTensors()
        self._live.__enter__()  # type: ignore[no-untyped-call]
        return True


def _return_free_memory() -> None:
    """Gives the freed heap back to the system where the C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _high_mark() -> int:
    with open(_STATUS, encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
