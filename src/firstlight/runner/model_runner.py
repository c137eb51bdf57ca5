"""Owns one step on one rank: rows, batch, forward, finiteness, sampling; decides nothing about what
runs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstlight.kernels.registry import KernelSet
from firstlight.layers.carry import finite_tokens, select_tokens
from firstlight.layers.layer_state import LayerState
from firstlight.runner.batch_builder import StepBatch, build_batch
from firstlight.runner.cache_tensors import copy_slots
from firstlight.runner.encoder_cache import EncoderCache
from firstlight.runner.image_placement import find_placements, place_images
from firstlight.runner.page_copies import copy_pages, layers_by_group
from firstlight.runner.rows import RowTable
from firstlight.runner.sampler import SampleRow, allowed_tokens, sample, token_logprobs
from firstlight.runner.tier_store import TierStore
from firstlight.schedule.step import (
    NO_TOKEN_LEFT,
    FailedRow,
    PromptLogprobs,
    SampledToken,
    StepPlan,
    StepResult,
    TierReport,
    TokenLogprobs,
)

# Prompt tokens whose logits are held at once while their log-probabilities are taken.
SCORE_CHUNK = 64
NOT_FINITE = "the model produced numbers that are not finite (NaN or infinity)"


@dataclass(frozen=True)
class RunnerContext:
    """What a runner works with. `samples` is true on the rank that holds whole logits; `images` is
    None for a model that reads none, `tiers` where no state lies outside the device.
    """

    module: Any
    states: Sequence[LayerState]
    kernels: KernelSet
    device: torch.device
    samples: bool
    images: EncoderCache | None = None
    tiers: TierStore | None = None


class ModelRunner:
    """Runs step plans against one rank's model, rows and caches."""

    def __init__(self, context: RunnerContext, table: RowTable) -> None:
        self._context = context
        self._table = table

    @property
    def encoder_bytes(self) -> int:
        """Bytes that features of images are kept in."""
        return self._context.images.used_bytes if self._context.images is not None else 0

    def forget_images(self) -> None:
        """Forgets features of images: other weights made them."""
        if self._context.images is not None:
            self._context.images.clear()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step and returns what was sampled, scored and found not finite."""
        began = time.perf_counter()
        self._table.apply(plan)
        context = self._context
        if context.tiers is not None:
            context.tiers.begin(plan)
        elif plan.moves:
            copy_pages(layers_by_group(context.states), plan.moves)
        copy_slots(context.states, plan.restores)
        if context.tiers is not None:
            context.tiers.fetch(plan.fetches)
        if not plan.steps:
            return StepResult(
                plan.step, [], [], [], time.perf_counter() - began, self._report(plan)
            )
        placements = find_placements(plan, self._table)
        placed = place_images(placements, context.images, context.device)
        batch = build_batch(plan, self._table, context.device, placed.features)
        carry = context.module(batch.tokens_T, batch.packed, context.states)
        copy_slots(context.states, plan.saves)
        self._table.drop_computed_images(plan)
        failed = {**self._failed_rows(batch, finite_tokens(carry)), **placed.failed}
        scores = self._score_prompts(batch, carry)
        tokens = self._sample(batch, carry, plan, failed)
        return StepResult(
            plan.step,
            [t for t in tokens if t.row not in failed],
            [s for s in scores if s.row not in failed],
            [FailedRow(row, failed[row]) for row in sorted(failed)],
            time.perf_counter() - began,
            self._report(plan),
        )

    def _report(self, plan: StepPlan) -> TierReport | None:
        tiers = self._context.tiers
        return None if tiers is None else tiers.report(idle=not plan.steps)

    def _failed_rows(self, batch: StepBatch, finite_T: Tensor) -> dict[int, str]:
        if bool(finite_T.all()):  # host sync, once a step
            return {}
        good = finite_T.tolist()
        spans = zip(batch.rows, batch.packed.bounds[:-1], batch.packed.bounds[1:], strict=True)
        return {row: NOT_FINITE for row, start, stop in spans if not all(good[start:stop])}

    def _sample(
        self, batch: StepBatch, carry: Any, plan: StepPlan, failed: dict[int, str]
    ) -> list[SampledToken]:
        """Samples every row that has caught up; adds rows that cannot be sampled to `failed`.

        All ranks run the head, because its parts are collected by a collective.
        """
        if not batch.sample_index:
            return []
        index_S = torch.tensor(batch.sample_index, device=self._context.device)
        logits_SV = self._context.module.head(select_tokens(carry, index_S)).float()
        if not self._context.samples:
            return []
        finite_S = logits_SV.sum(-1).isfinite()
        if not bool(finite_S.all()):
            bad = finite_S.logical_not().nonzero().squeeze(1).tolist()
            failed.update((batch.sample_rows[i], NOT_FINITE) for i in bad)
            logits_SV = logits_SV.nan_to_num(0.0, 0.0, 0.0)
        allowed = self._allowed(plan, logits_SV, failed)
        rows = [self._sample_row(r, allowed.get(r)) for r in batch.sample_rows]
        ids = sample(logits_SV, rows, self._context.kernels)
        logprobs = self._logprobs(logits_SV, ids, rows)
        return [
            SampledToken(row, token, logprob)
            for row, token, logprob in zip(batch.sample_rows, ids, logprobs, strict=True)
        ]

    def _sample_row(self, index: int, allowed_V: Tensor | None) -> SampleRow:
        row = self._table[index]
        return SampleRow(row.params, row.token_ids, row.num_prompt, allowed_V)

    @staticmethod
    def _allowed(plan: StepPlan, logits_SV: Tensor, failed: dict[int, str]) -> dict[int, Tensor]:
        """The tokens of every row with a mask; a row without any is added to `failed`."""
        allowed: dict[int, Tensor] = {}
        for mask in plan.masks:
            allowed_V = allowed_tokens(mask.bits, logits_SV.shape[1], logits_SV.device)
            if bool(allowed_V.any()):
                allowed[mask.row] = allowed_V
            else:
                failed.setdefault(mask.row, NO_TOKEN_LEFT)
        return allowed

    @staticmethod
    def _logprobs(
        logits_SV: Tensor, ids: list[int], rows: list[SampleRow]
    ) -> list[TokenLogprobs | None]:
        wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        out: list[TokenLogprobs | None] = [None] * len(rows)
        if wanting:
            num_top = max(rows[i].params.logprobs or 0 for i in wanting)
            found = token_logprobs(logits_SV[wanting], [ids[i] for i in wanting], num_top)
            for i, entry in zip(wanting, found, strict=True):
                top = entry.top[: rows[i].params.logprobs or 0]
                out[i] = TokenLogprobs(entry.token_id, entry.logprob, entry.rank, top)
        return out

    def _score_prompts(self, batch: StepBatch, carry: Any) -> list[PromptLogprobs]:
        return [
            score
            for row, first, position, count in batch.score_spans
            if (score := self._score(row, carry, (first, position, count))) is not None
        ]

    def _score(self, index: int, carry: Any, span: tuple[int, int, int]) -> PromptLogprobs | None:
        """The hidden state at position p scores token p + 1; the last known token scores
        nothing.
        """
        first, position, count = span
        row = self._table[index]
        count = min(count, row.num_prompt - 1 - position)
        tokens: list[TokenLogprobs] = []
        for start in range(0, count, SCORE_CHUNK):
            size = min(SCORE_CHUNK, count - start)
            index_S = torch.arange(first + start, first + start + size, device=self._context.device)
            logits_SV = self._context.module.head(select_tokens(carry, index_S)).float()
            if self._context.samples:
                ids = row.token_ids[position + start + 1 : position + start + 1 + size]
                tokens += token_logprobs(logits_SV, ids, row.params.prompt_logprobs or 0)
        return PromptLogprobs(index, position + 1, tokens) if tokens else None
