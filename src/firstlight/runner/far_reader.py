"""Owns how layers of one cache group read pages that lie outside the device, where they are.

Knows no attention: a layer asks for pages by number and is given staging buffers to read them into.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from firstlight.runner.tier_store import TierStore
from firstlight.runner.unit_bytes import Row, fill_tensors
from firstlight.sharding.attention_pattern import CHOSEN_TOKENS, SEGMENT_TOKENS

NOT_A_NUMBER = float("nan")
# Pages that one task reads.
PER_TASK = 16
# How often a step that waits looks whether the disk gives signs of life.
LOOK_SECONDS = 0.5


@dataclass
class FarPart:
    """Pages of one layer, read by one task to `places` of staging buffers.

    Once it is dropped the task writes nothing: what it sees is decided under `lock`.
    """

    layer: int
    pages: Sequence[int]
    places: Sequence[int]
    into: Sequence[Tensor]
    is_dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @torch.inference_mode()
    def put(self, index: int, data: Row | None) -> bool:
        """Fills the place of a page, with NaN without data; False when nobody wants it."""
        with self.lock:
            if self.is_dropped:
                return False
            if data is not None:
                fill_tensors(self._target(index), data)
            else:
                _fill_with_nan(self._target(index))
            return True

    @torch.inference_mode()
    def drop(self) -> None:
        """From its return on nothing is written: all of its pages are NaN."""
        with self.lock:
            self.is_dropped = True
            for index in range(len(self.pages)):
                _fill_with_nan(self._target(index))

    def _target(self, index: int) -> list[Tensor]:
        return [tensor[self.places[index]] for tensor in self.into]


class PartsPending:
    """Pages that threads are bringing."""

    def __init__(self, reader: "FarReader", tasks: Mapping[Future[None], FarPart]) -> None:
        self._reader, self._tasks = reader, tasks

    def wait(self) -> None:
        """Returns when all of them are there, or when nobody is to wait for the disk any more:
        pages that it has not given then are lost.
        """
        left = set(self._tasks)
        while left:
            done, left = wait(left, timeout=LOOK_SECONDS)
            for task in done:
                task.result()
            if left and self._reader.is_silent:
                for task in left:
                    task.cancel()
                    self._reader.give_up(self._tasks[task])
                return


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

    @property
    def is_silent(self) -> bool:
        """Whether nobody is to wait for the disk any more."""
        return self._store.is_silent

    def fetch(self, layer: int, pages: Sequence[int], into: Sequence[Tensor]) -> PartsPending:
        """Starts to copy far pages to the first places of `into`; one that cannot be had becomes
        NaN and is reported with the step.
        """
        by_place: dict[str, list[int]] = {}
        for index, page in enumerate(pages):
            by_place.setdefault(self._store.place(self._group, page), []).append(index)
        tasks: dict[Future[None], FarPart] = {}
        for place, indexes in by_place.items():
            for first in range(0, len(indexes), PER_TASK):
                some = indexes[first : first + PER_TASK]
                part = FarPart(layer, [pages[index] for index in some], some, into)
                tasks[self._store.submit(place, self._read, part)] = part
        return PartsPending(self, tasks)

    def give_up(self, part: FarPart) -> None:
        """Reports the pages of a part as lost, and leaves NaN where they were to be."""
        part.drop()
        for page in part.pages:
            self._store.lose(self._group, page, "it has given no sign for too long")

    def _read(self, part: FarPart) -> None:
        buffer: Row = np.empty(self._store.layer_bytes(self._group, part.layer), np.uint8)
        for index, page in enumerate(part.pages):
            data = self._store.read_layer(self._group, page, part.layer, buffer)
            if not part.put(index, data):
                return


def _fill_with_nan(targets: Sequence[Tensor]) -> None:
    for target in targets:
        if target.is_floating_point():
            target.fill_(NOT_A_NUMBER)
