"""Owns the rows of a rank: tokens and page tables of every sequence, kept between steps.

Permanent rows are never step inputs: each step gathers what it needs from them into fresh tensors.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from firstlight.kernels.host_copy import send
from firstlight.schedule.request import SamplingParams
from firstlight.schedule.step import NewSequence, SequenceStep, StepPlan


@dataclass
class RowImage:
    """An image behind the placeholder tokens [first, first + count) of a sequence.

    `features_MD` are kept from the first step that needs them until its last token is computed.
    """

    first: int
    count: int
    digest: str
    grid: tuple[int, int, int]
    patches: bytes
    features_MD: Tensor | None = None

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.first + self.count


@dataclass
class Row:
    """One sequence on this rank. `num_prompt` tells prompt from output.

    `images` are those whose tokens are not all computed.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    num_pages: list[int] = field(default_factory=list)
    images: list[RowImage] = field(default_factory=list)


class RowTable:
    """Rows by index, and page tables [groups, rows, pages] in int32 on the CPU.

    The table of a recurrent group uses one column: the slot of each sequence.
    """

    def __init__(self, max_rows: int, num_groups: int, max_pages: int) -> None:
        self._rows: list[Row | None] = [None] * max_rows
        self._tables_GRP = torch.zeros(num_groups, max_rows, max_pages, dtype=torch.int32)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        assert row is not None, f"row {index} holds no sequence"
        return row

    def apply(self, plan: StepPlan) -> None:
        """Drops released rows, takes in new sequences and the differences of running ones."""
        for index in plan.released:
            self._rows[index] = None
        for sequence in plan.new:
            self._add(sequence)
        for step in plan.steps:
            self._extend(step)

    def drop_computed_images(self, plan: StepPlan) -> None:
        """Forgets images behind which no token is left to compute, once the step has run.

        A sequence that has to start again is sent whole again.
        """
        for step in plan.steps:
            row = self[step.row]
            row.images = [i for i in row.images if i.stop > step.start + step.count]

    def table(self, group: int, rows: list[int], device: torch.device) -> Tensor:
        """Returns the page tables [B, P] of these rows, P the most pages any of them has."""
        pages = max((self[r].num_pages[group] for r in rows), default=0)
        index_B = torch.tensor(rows, dtype=torch.int64)
        return send(self._tables_GRP[group, :, :pages].index_select(0, index_B), device)

    @property
    def num_groups(self) -> int:
        """Cache groups."""
        return self._tables_GRP.shape[0]

    def _add(self, sequence: NewSequence) -> None:
        assert self._rows[sequence.row] is None, f"row {sequence.row} is taken"
        row = Row(
            sequence.request_id, list(sequence.token_ids), sequence.num_prompt, sequence.params
        )
        row.num_pages = [0] * len(sequence.blocks)
        row.images = [
            RowImage(m.first, m.count, m.digest, m.grid, m.patches) for m in sequence.media
        ]
        self._rows[sequence.row] = row
        self._append_pages(sequence.row, row, sequence.blocks)

    def _extend(self, step: SequenceStep) -> None:
        row = self[step.row]
        row.token_ids.extend(step.new_tokens)
        if step.moved:
            groups, places, pages = zip(*step.moved, strict=True)
            at = (torch.tensor(groups), torch.tensor(step.row), torch.tensor(places))
            self._tables_GRP[at] = torch.tensor(pages, dtype=torch.int32)
        self._append_pages(step.row, row, step.new_blocks)

    def _append_pages(self, index: int, row: Row, blocks: list[list[int]]) -> None:
        for group, new in enumerate(blocks):
            if new:
                first = row.num_pages[group]
                pages = torch.tensor(new, dtype=torch.int32)
                self._tables_GRP[group, index, first : first + len(new)] = pages
                row.num_pages[group] += len(new)
