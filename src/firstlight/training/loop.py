"""Owns a training run: stages of steps, the learning rate, stops and kept states.

It knows no task: a stage's lesson computes the loss of a step. Every step is a function of the kept
state, so a resumed run equals an undisturbed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.training.examples import Example, TrainingBatch, make_batch
from firstlight.training.model import Trainable
from firstlight.training.optimizer import make_optimizer
from firstlight.training.published import as_published
from firstlight.training.state import Progress, load_state, save_state

STATE_FILE = "state.pt"
_LEAST_RATE = 0.02  # of the stage's rate, at its end

Scores = Mapping[str, Sequence[bool]]


@dataclass(frozen=True)
class Schedule:
    """Sizes of a stage's steps: a linear warm-up, a plateau, a linear fall over the last `fall` of
    `steps`. `published`: gradients are those at the published (rounded) values.
    """

    steps: int
    rate: float
    warm_up: int = 20
    fall: float = 0.3
    weight_decay: float = 0.01
    clip: float = 1.0
    balance: float = 0.003
    published: bool = False
    muon: bool = False

    def rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        falling = self.steps * self.fall
        down = 1.0 if falling <= 0 else min(1.0, (self.steps - step) / falling)
        return self.rate * min(1.0, (step + 1) / self.warm_up) * max(down, _LEAST_RATE)


class Outcome(NamedTuple):
    """What a batch gave: the loss, the tokens seen, and which examples of each task were right."""

    loss: Tensor
    tokens: int
    scores: Scores


class Lesson(Protocol):
    """What a stage teaches."""

    def outcome(self, model: Trainable, step: int, levels: dict[str, float]) -> Outcome:
        """Computes a step's loss: a function of the model, the step and the levels alone."""

    def heard(self, scores: Scores, levels: dict[str, float]) -> None:
        """Hears what was right; may change levels in place."""


class Stage(NamedTuple):
    """A part of a run; its optimiser begins anew."""

    name: str
    schedule: Schedule
    lesson: Lesson


class StepReport(NamedTuple):
    """What a step did; `worst_load` is the largest load of an expert relative to the mean."""

    stage: str
    step: int
    loss: float
    tokens: int
    scores: Scores
    worst_load: float
    skipped: bool
    stage_steps: int


class Run:
    """A model on its way through stages; `take_step` goes one step further."""

    def __init__(self, model: Trainable, stages: Sequence[Stage]) -> None:
        self.model = model
        self.stages = tuple(stages)
        self.progress = Progress()
        self.optimizer = _optimizer(model, self.stages[0].schedule)

    @property
    def is_done(self) -> bool:
        """Whether all stages are at their end."""
        return self.progress.stage >= len(self.stages)

    def resume(self, path: Path) -> None:
        """Continues from a kept state."""
        self.progress = load_state(path, self.model.module, self.optimizer)

    def keep(self, path: Path) -> None:
        """Keeps the state in a file."""
        save_state(path, self.model.module, self.optimizer, self.progress)

    def take_step(self) -> StepReport:
        """Learns from the next batch. A step whose gradient is not finite changes no weight."""
        began = time.monotonic()
        progress = self.progress
        name, schedule, lesson = self.stages[progress.stage]
        step = progress.step
        with as_published(self.model) if schedule.published else nullcontext():
            outcome = lesson.outcome(self.model, step, progress.levels)
            outcome.loss.backward()  # type: ignore[no-untyped-call]
        is_finite = self._update(schedule, step)
        lesson.heard(outcome.scores, progress.levels)
        worst = self.model.balance(schedule.balance)
        loss = outcome.loss.item()
        progress.history.append((progress.total, loss))
        progress.total += 1
        progress.tokens += outcome.tokens
        progress.seconds += time.monotonic() - began
        progress.step += 1
        if progress.step >= schedule.steps:
            self._next_stage()
        return StepReport(
            name, step, loss, outcome.tokens, outcome.scores, worst, not is_finite, schedule.steps
        )

    def _next_stage(self) -> None:
        self.progress.stage += 1
        self.progress.step = 0
        if not self.is_done:
            schedule = self.stages[self.progress.stage].schedule
            self.optimizer = _optimizer(self.model, schedule)

    def _update(self, schedule: Schedule, step: int) -> bool:
        parameters = [p for p in self.model.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, schedule.clip)
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = schedule.rate_at(step)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return is_finite


def train(
    run: Run,
    folder: Path,
    *,
    seconds: float | None = None,
    keep_every: float = 60.0,
    report: Callable[[StepReport], Any],
) -> bool:
    """Steps until the last stage's end or the time is up; returns whether it came to the end.

    The state is kept in `folder` every `keep_every` seconds and at the end.
    """
    began = kept = time.monotonic()
    while not run.is_done:
        report(run.take_step())
        now = time.monotonic()
        if seconds is not None and now - began > seconds:
            break
        if now - kept > keep_every:
            run.keep(folder / STATE_FILE)
            kept = now
    run.keep(folder / STATE_FILE)
    return run.is_done


def sequence_outcome(model: Trainable, examples: Sequence[Example]) -> Outcome:
    """Returns the mean cross entropy over all tokens that count."""
    batch = make_batch(examples)
    logits_MV = model.logits(batch)
    loss = functional.cross_entropy(logits_MV, batch.targets_M)
    return Outcome(loss, len(batch.tokens_T), answered(logits_MV, batch))


def answered(logits_MV: Tensor, batch: TrainingBatch) -> dict[str, list[bool]]:
    """Returns for each task whether each of its examples had all tokens predicted."""
    wrong_M = logits_MV.argmax(-1) != batch.targets_M
    wrong = torch.zeros(len(batch.tasks), dtype=torch.long)
    wrong.index_add_(0, batch.owner_M, wrong_M.long())
    scores: dict[str, list[bool]] = {}
    for task, count in zip(batch.tasks, wrong.tolist(), strict=True):
        scores.setdefault(task, []).append(count == 0)
    return scores


def _optimizer(model: Trainable, schedule: Schedule) -> torch.optim.Optimizer:
    decay = schedule.weight_decay
    return make_optimizer(model.module, rate=schedule.rate, weight_decay=decay, muon=schedule.muon)
