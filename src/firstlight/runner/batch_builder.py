"""Owns how a step plan becomes the tensors of a step; takes no decision about what runs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.kernels.host_copy import send
from firstlight.layers.packed_batch import PackedBatch, PlacedFeatures
from firstlight.runner.rows import RowTable
from firstlight.schedule.step import StepPlan


@dataclass(frozen=True)
class StepBatch:
    """The inputs of one step. `sample_rows[i]` wants the token after packed token
    `sample_index[i]`.

    `score_spans` are (row, first packed token, its position, count) of rows that want the
    log-probabilities of their prompt.
    """

    tokens_T: Tensor
    packed: PackedBatch
    rows: tuple[int, ...]
    sample_rows: tuple[int, ...]
    sample_index: tuple[int, ...]
    score_spans: tuple[tuple[int, int, int, int], ...]


def build_batch(
    plan: StepPlan,
    table: RowTable,
    device: torch.device,
    features: PlacedFeatures | None = None,
) -> StepBatch:
    """Gathers tokens, positions, bounds and page tables of a step from the rows.

    `features` are those of the images of this step.
    """
    tokens: list[int] = []
    positions: list[Tensor] = []
    bounds, contexts = [0], []
    sample_rows, sample_index, spans = [], [], []
    for step in plan.steps:
        row = table[step.row]
        stop = step.start + step.count
        if row.params.prompt_logprobs is not None and step.start < row.num_prompt:
            spans.append((step.row, len(tokens), step.start, step.count))
        tokens.extend(row.token_ids[step.start : stop])
        positions.append(torch.arange(step.start, stop))
        bounds.append(len(tokens))
        contexts.append(stop)
        if step.sample:
            assert stop == len(row.token_ids), f"row {step.row} samples before it has caught up"
            sample_rows.append(step.row)
            sample_index.append(len(tokens) - 1)
    rows = [step.row for step in plan.steps]
    packed = PackedBatch(
        positions_T=torch.cat(positions).to(device),
        bounds=tuple(bounds),
        starts_B1=send(torch.tensor(bounds, dtype=torch.int32), device),
        contexts_B=send(torch.tensor(contexts, dtype=torch.int32), device),
        tables=tuple(table.table(g, rows, device) for g in range(table.num_groups)),
        features=features,
    )
    return StepBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64, device=device),
        packed=packed,
        rows=tuple(rows),
        sample_rows=tuple(sample_rows),
        sample_index=tuple(sample_index),
        score_spans=tuple(spans),
    )
