"""Owns judging a model by its predictions: an example is answered when every token that counts is
the likeliest one, which is when greedy decoding would write it. It knows no task.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch

from firstlight.training.examples import Example, make_batch
from firstlight.training.loop import answered
from firstlight.training.model import Trainable

_TOKENS_AT_ONCE = 4096


def accuracies(model: Trainable, examples: Iterable[Example]) -> dict[str, tuple[int, int]]:
    """Returns for each task how many examples were answered, and how many there were."""
    totals: dict[str, tuple[int, int]] = {}
    waiting = iter(examples)
    with torch.no_grad():
        while chunk := _next_chunk(waiting):
            batch = make_batch(chunk)
            for task, right in answered(model.logits(batch), batch).items():
                before, seen = totals.get(task, (0, 0))
                totals[task] = (before + sum(right), seen + len(right))
    return totals


def _next_chunk(waiting: Iterable[Example]) -> list[Example]:
    chunk: list[Example] = []
    tokens = 0
    while tokens < _TOKENS_AT_ONCE and (more := list(islice(waiting, 1))):
        chunk += more
        tokens += len(more[0].tokens)
    return chunk
