"""Owns the time of one step of one pipeline stage: roofline of every operator, and collectives.

Knows no request: a step is so many tokens of so many sequences with so much past. Seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import NamedTuple

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.rates import Rates
from firstlight.planning.reading import summaries_read, tokens_read
from firstlight.planning.work import LayerKind, Matmul, ModelWork, state_work
from firstlight.sharding.layout import Layout, stage_layers
from firstlight.sharding.state_spec import cached_token_bytes, summary_bytes

# Values a layer reads and writes beside its matrices, in widths of the residual stream.
_STREAM_PASSES = 12
_FP32 = 4


@dataclass(frozen=True)
class Step:
    """What one data-parallel part computes: new tokens of `sequences`, `past` tokens behind each.

    `prompt`: tokens are one prompt's chunk, else one of each sequence.
    """

    tokens: int
    sequences: int
    past: float
    prompt: bool = False


class Spent(NamedTuple):
    """Where the time of a step goes."""

    weights: float = 0.0
    attention: float = 0.0
    small_kernels: float = 0.0
    collectives: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """The sum with so many of another."""
        return Spent(*(a + b * times for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class CostModel:
    """A model under an arrangement on a fleet with one set of constants."""

    work: ModelWork
    arrangement: Arrangement
    rates: Rates
    cache_element_bytes: int
    kv_dtype: str = "auto"

    @property
    def layout(self) -> Layout:
        """The layout of one replica."""
        return self.arrangement.layout

    def stages(self, step: Step) -> list[Spent]:
        """Returns the time of each pipeline stage, its message to the next one included."""
        layout, work = self.layout, self.work
        kinds = [self.layer(kind, step) for kind in work.kinds]
        head, hand_over = self._head(step), self._hand_over(step)
        found = []
        for stage in range(layout.pp):
            layers = stage_layers(work.facts.num_layers, layout, stage)
            spent = Spent()
            for kind, each in zip(work.kinds, kinds, strict=True):
                spent = spent.plus(each, kind.count(layers))
            last = stage == layout.pp - 1
            found.append(spent.plus(head if last else hand_over))
        return found

    def joint(self, steps: Sequence[Step]) -> float:
        """Returns the time of several parts computed as one step on one stage: matrices see the
        tokens of all, attention each part for itself.
        """
        tokens = sum(step.tokens for step in steps)
        rows = sum(step.sequences for step in steps)
        whole = Step(tokens, rows, 0.0)
        seconds = self._head(whole).total
        for kind in self.work.kinds:
            each = sum(self._matmul(matmul, whole) for matmul in kind.matmuls)
            each += sum(self._attention(kind, step) for step in steps)
            each += self._small(kind, whole) + self._collectives(kind, whole)
            seconds += each * len(kind.layers)
        return seconds

    def layer(self, kind: LayerKind, step: Step) -> Spent:
        """Returns the time of one layer."""
        weights = sum(self._matmul(matmul, step) for matmul in kind.matmuls)
        collectives = self._collectives(kind, step)
        if step.prompt:
            collectives *= 1 - self.rates.constants.overlap
        return Spent(weights, self._attention(kind, step), self._small(kind, step), collectives)

    def _matmul(self, matmul: Matmul, step: Step) -> float:
        table, layout = self.work.table, self.layout
        local = table.local_bytes(layout)
        num_bytes = float(sum(local[i] for i in matmul.classes))
        if matmul.is_expert:
            touched, flops = self._experts(matmul, step)
            return self.rates.operation(num_bytes * touched, flops, narrow=matmul.narrow)
        whole = sum(table.whole_bytes(table.classes[i]) for i in matmul.classes)
        flops = 2.0 * matmul.values * num_bytes / whole * step.tokens
        return self.rates.operation(num_bytes, flops, narrow=matmul.narrow)

    def _experts(self, matmul: Matmul, step: Step) -> tuple[float, float]:
        """Returns the share of a rank's experts that are read, and FLOP on the fullest rank.

        Distinct experts of T tokens that choose k of E: E x (1 - (1 - k/E)^T). The fullest of n
        ranks with mean load m has about m + sqrt(2 m ln n) (chance), times the imbalance.
        """
        layout, experts, chosen = self.layout, self.work.facts.num_experts, self.work.chosen
        tokens = step.tokens * layout.dp
        draws = tokens * chosen / layout.ep
        fullest = draws + (sqrt(2 * draws * log(layout.ep)) if layout.ep > 1 else 0.0)
        if layout.ep > 1:
            fullest *= self.rates.constants.imbalance
        distinct = experts * (1 - (1 - chosen / experts) ** tokens)
        held = experts / layout.ep
        touched = min(held, distinct / layout.ep * fullest / draws) / held
        return touched, 2.0 * matmul.values * fullest / layout.expert_tp

    def _attention(self, kind: LayerKind, step: Step) -> float:
        state, layout = kind.state, self.layout
        cost = state_work(state, self.work.facts, layout.tp)
        size = self.cache_element_bytes
        per_token = cached_token_bytes(state, layout.tp, size, self.kv_dtype)
        fixed = state.sequence_bytes(layout.tp, size)
        past = tokens_read(state, kind.pattern, step.past)
        shared = self.arrangement.context_parallel if state.kind == "latent" else 1
        num_bytes = step.sequences * (past * per_token / shared + 2 * fixed)
        flops = cost.step_flops * step.tokens
        if kind.pattern.is_sparse:
            # Every token reads what it chose; all of a sequence read its summaries once.
            summary = summary_bytes(state, layout.tp)
            scored = step.sequences * step.past * summary
            num_bytes = step.tokens * past * (per_token - summary) + scored
            flops += cost.token_flops * step.tokens * past
            flops += cost.choose_flops * step.tokens * summaries_read(state, step.past)
        elif step.prompt and kind.absorbs:
            flops += cost.token_flops * step.tokens * (past + step.tokens / 2)
        elif step.prompt:
            flops += cost.pair_flops * step.tokens * (past + step.tokens / 2)
            flops += cost.expand_flops * past
        else:
            flops += cost.token_flops * step.tokens * past / shared
        return self.rates.operation(num_bytes, flops)

    def _small(self, kind: LayerKind, step: Step) -> float:
        work = self.work
        mixed = 2 * (work.bank_rows / 2 + 1) if work.bank_rows else 0
        width = work.hidden * (_STREAM_PASSES + mixed) * work.table.element_bytes
        moving = self.rates.operation(step.tokens * width, 0.0)
        return max(moving, kind.extra_kernels * self.rates.constants.kernel)

    def _collectives(self, kind: LayerKind, step: Step) -> float:
        layout, size = self.layout, self.work.table.element_bytes
        seconds = 0.0
        for one in kind.sums:
            num_bytes = float(step.tokens * one.width * size)
            if one.module.endswith("routed") and layout.dp > 1:
                seconds += self._exchange(num_bytes)
            else:
                seconds += self.rates.all_reduce(num_bytes, layout.tp)
        if self.arrangement.context_parallel > 1 and kind.state.kind == "latent":
            rows = step.sequences * self.work.facts.dims["value_rows"] / layout.tp
            seconds += 2 * self.rates.all_reduce(rows * _FP32, self.arrangement.context_parallel)
        return seconds

    def _exchange(self, num_bytes: float) -> float:
        """Tokens to their experts and back, over all ranks that share the experts."""
        layout = self.layout
        copies = min(self.work.chosen, layout.ep) if layout.ep > 1 else layout.dp
        sent = num_bytes * copies / layout.tp
        return 2 * self.rates.all_to_all(sent, layout.dp * layout.tp)

    def _head(self, step: Step) -> Spent:
        rows = 1 if step.prompt else step.sequences
        weights = sum(self._matmul(m, Step(rows, rows, 0.0)) for m in self.work.head)
        logits = rows * self.work.vocab / self.layout.tp * _FP32
        gathered = self.rates.all_to_all(logits, self.layout.tp)
        return Spent(weights=weights, collectives=gathered)

    def _hand_over(self, step: Step) -> Spent:
        work, layout = self.work, self.layout
        carry = work.carry * work.table.element_bytes
        far = layout.world_size > self.rates.island
        return Spent(collectives=self.rates.send(step.tokens * carry, far=far))
