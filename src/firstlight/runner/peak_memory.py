"""Owns what a rank's steps take beside what lasts: the peak above the state at rest.

Knows no plan of memory. On a host it is resident memory, whose high mark the system lets a process
lower; steps that score prompts are left out, for their logits are none a plan counts.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

import torch

from firstlight.metrics.series import resident_bytes
from firstlight.runner.memory import RankDevice
from firstlight.schedule.step import StepPlan

_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
_RESET_HIGH_MARK = "5"
_TIMES = 3


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
        self._rest = held_bytes
        self._peak = 0
        if not place.owned:
            _return_free_memory()
            self._rest = resident_bytes()

    @property
    def rest_bytes(self) -> int:
        """What is held before a step: by tensors on a device of its own, by the process on a
        host."""
        return self._rest

    @property
    def peak_bytes(self) -> int:
        """The most held in the step measured last; 0 when none was."""
        return self._peak

    def before(self, plan: StepPlan) -> None:
        """Looks at a step that is about to run."""
        self._scoring -= set(plan.released)
        self._scoring |= {s.row for s in plan.new if s.params.prompt_logprobs is not None}
        scores = any(step.row in self._scoring for step in plan.steps)
        self._is_measured = not scores and self._is_worth(plan.num_tokens) and self._lower_mark()

    def after(self) -> int:
        """Returns what the step took above rest at its peak; 0 when it was not measured."""
        if not self._is_measured:
            return 0
        if self._place.owned:
            self._peak = self._place.peak_bytes()
        else:
            self._peak = _high_mark()
            _return_free_memory()
            # Blocks written for the first time stay: they are no part of the step.
            self._rest = resident_bytes()
        return max(0, self._peak - self._rest)

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
        return bool(resident_bytes())


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
