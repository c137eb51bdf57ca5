"""Owns how layers of one cache group read pages that lie outside the device, where they are.

Knows no attention: a layer asks for pages by number and is given staging buffers to read them into.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from firstlight.runner.tier_store import TierStore
from firstlight.runner.unit_bytes import Row, fill_tensors
from firstlight.sharding.attention_pattern import CHOSEN_TOKENS, SEGMENT_TOKENS

NOT_A_NUMBER = float("nan")
# Pages that one task reads.
PER_TASK = 16


class TasksPending:
    """Pages that threads are bringing."""

    def __init__(self, tasks: Sequence[Future[None]]) -> None:
        self._tasks = tasks

    def wait(self) -> None:
        """Returns when all of them are there."""
        for task in self._tasks:
            task.result()


class FarReader:
    """The `FarPages` of one group, over a rank's store; `page_tensors` are those of each layer."""

    def __init__(
        self,
        store: TierStore,
        group: int,
        page_tensors: Sequence[tuple[Tensor, ...]],
        *,
        page_tokens: int,
        chooses: bool = False,
    ) -> None:
        self._store, self._group = store, group
        sets = (CHOSEN_TOKENS, 0) if chooses else (SEGMENT_TOKENS, SEGMENT_TOKENS)
        self._pages = tuple(-(-tokens // page_tokens) for tokens in sets)
        self._layers = page_tensors
        self._staging: dict[tuple[object, ...], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    @property
    def first(self) -> int:
        """The least page id that is far."""
        return int(self._layers[0][0].shape[0])

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers made so far."""
        sets = (tensors for pair in self._staging.values() for tensors in pair)
        return sum(tensor.nbytes for tensors in sets for tensor in tensors)

    def staging(self, layer: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Two sets of buffers, one if blocks are chosen; layers of one shape share them."""
        tensors = self._layers[layer]
        shape = tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)
        if shape not in self._staging:
            first, second = (
                tuple(t.new_empty((pages, *t.shape[1:])) for t in tensors) for pages in self._pages
            )
            self._staging[shape] = (first, second)
        return self._staging[shape]

    def fetch(self, layer: int, pages: Sequence[int], into: Sequence[Tensor]) -> TasksPending:
        """Starts to copy far pages to the first places of `into`; one that cannot be had becomes
        NaN and is reported with the step.
        """
        parts = [pages[i : i + PER_TASK] for i in range(0, len(pages), PER_TASK)]
        return TasksPending(
            [
                self._store.submit(self._read, layer, part, [t[i * PER_TASK :] for t in into])
                for i, part in enumerate(parts)
            ]
        )

    @torch.inference_mode()
    def _read(self, layer: int, pages: Sequence[int], into: Sequence[Tensor]) -> None:
        buffer: Row = np.empty(self._store.layer_bytes(self._group, layer), np.uint8)
        for place, page in enumerate(pages):
            targets = [tensor[place] for tensor in into]
            data = self._store.read_layer(self._group, page, layer, buffer)
            if data is not None:
                fill_tensors(targets, data)
                continue
            for target in targets:
                if target.is_floating_point():
                    target.fill_(NOT_A_NUMBER)
