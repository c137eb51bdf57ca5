"""Owns how units pass through a conversion: several at a time, in bounded memory, hooks in order.

Knows neither what a store directory is nor why its units are wanted.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import product
from typing import Protocol

import torch
from blake3 import blake3

from firstlight.adapt.shard_plan import UNUSED_UNIT
from firstlight.adapt.shard_tiles import (
    Tile,
    granule_rows,
    read_tile,
    stored_values,
    tiles_of,
    work_bytes,
)
from firstlight.checkpoint.store_layout import (
    BlockRecord,
    GranuleKey,
    UnitRecord,
    payload_bytes,
)
from firstlight.checkpoint.tensor_info import Array, Checkpoint
from firstlight.checkpoint.torch_types import copy_values
from firstlight.sharding.codecs import find_codec

# What all tiles in hand may take together, however many threads there are.
WORK_BYTES = 192 * 2**20
_MOST_THREADS = 8
_HELD_UNITS = 2  # with a hook: the unit it looks at, and the one that is read meanwhile

OnBytes = Callable[[int, str], None]
OnUnit = Callable[[str, Mapping[str, torch.Tensor]], None]
UnitTask = Callable[[int, UnitRecord], UnitRecord]


class UnitSink(Protocol):
    """What takes the bytes of one unit."""

    def write(self, key: GranuleKey, *, part: int, first_byte: int, rows: Array) -> None:
        """Takes rows of bytes of a part, one a granule from `key` on."""
        ...


class _Cancelled(Exception):
    """Ends a thread because another one has failed."""


class UnitPasses:
    """Passes units of a checkpoint through a task, in several threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        on_bytes: OnBytes,
        *,
        on_unit: OnUnit | None = None,
        threads: int = 0,
    ) -> None:
        """`on_bytes(num_bytes, unit)` is told what has passed, `on_unit` sees every unit's tensors
        whole and in order; each is called by one thread at a time. `threads` of 0 are as many as
        help: two a processor, one computing while another waits for the disk, 8 at most."""
        most = threads or min(_MOST_THREADS, 2 * (os.cpu_count() or 1))
        self._threads = min(most, _HELD_UNITS) if on_unit is not None else most
        self._checkpoint, self._on_bytes, self._on_unit = checkpoint, on_bytes, on_unit
        self._telling, self._changed = threading.Lock(), threading.Condition()
        self._free, self._turn, self._cancelled = WORK_BYTES, 0, False

    def run(self, units: Sequence[UnitRecord], task: UnitTask) -> list[UnitRecord]:
        """Returns what the task makes of every unit and its number. A task calls `read` or `skip`.

        Raises the first error of a task; the others end at their next tile.
        """
        self._turn, self._cancelled = 0, False
        with ThreadPoolExecutor(self._threads, thread_name_prefix="shard") as pool:
            futures = [pool.submit(task, number, unit) for number, unit in enumerate(units)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                self._cancel(futures)
        errors = [future.exception() for future in futures if not future.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, _Cancelled):
                raise error
        return [future.result() for future in futures]

    def _cancel(self, futures: Sequence[Future[UnitRecord]]) -> None:
        for future in futures:
            future.cancel()
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def read(self, number: int, unit: UnitRecord, output: UnitSink | None) -> str:
        """Reads a unit's tensors once: into `output`, to `on_unit`, into the digest returned."""
        hasher = blake3()
        on_unit = self._on_unit if unit.name != UNUSED_UNIT else None
        whole: dict[str, torch.Tensor] = {}
        for index, block in enumerate(unit.blocks):
            for expert, part in product(range(block.count), range(len(block.parts))):
                key = GranuleKey(index, expert, 0)
                for tile in tiles_of(block, block.parts[part]):
                    with self._room(work_bytes(block.parts[part], tile)):
                        values, rows = self._tile(block, part, key, tile=tile, hasher=hasher)
                        if output is not None:
                            first = key._replace(granule=tile.granule)
                            output.write(first, part=part, first_byte=tile.first_byte, rows=rows)
                        self._tell(rows.nbytes, unit)
                        if on_unit is not None and not block.parts[part].unused:
                            _keep(whole, block, part, expert=expert, tile=tile, values=values)
        with self._in_turn(number):
            if on_unit is not None:
                on_unit(unit.name, whole)
        return hasher.hexdigest()

    def skip(self, number: int, unit: UnitRecord) -> None:
        """Counts a unit that needs no pass."""
        self._tell(payload_bytes(unit), unit)
        with self._in_turn(number):
            pass

    def _tile(
        self, block: BlockRecord, number: int, key: GranuleKey, *, tile: Tile, hasher: blake3
    ) -> tuple[torch.Tensor, Array]:
        """Returns a tile's values as a store gives them back, and its bytes in each granule."""
        part = block.parts[number]
        source = part.sources[key.expert]
        values = read_tile(self._checkpoint, part, tile, source=source, on_bytes=hasher.update)
        rows = granule_rows(block, part, tile, values)
        if self._on_unit is not None and find_codec(part.codec).quantised:
            values = stored_values(block, part, rows)
        return values, rows

    def _tell(self, num_bytes: int, unit: UnitRecord) -> None:
        with self._telling:
            self._on_bytes(num_bytes, unit.name)

    @contextmanager
    def _room(self, num_bytes: int) -> Iterator[None]:
        """Holds so many bytes of the room for tiles, or all of it for a tile that is larger."""
        wanted = min(num_bytes, WORK_BYTES)
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._free >= wanted)
            if self._cancelled:
                raise _Cancelled
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()

    @contextmanager
    def _in_turn(self, number: int) -> Iterator[None]:
        """Waits until all units before this one have been looked at."""
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._turn == number)
            if self._cancelled:
                raise _Cancelled
        yield
        with self._changed:
            self._turn = number + 1
            self._changed.notify_all()


def _keep(
    whole: dict[str, torch.Tensor],
    block: BlockRecord,
    number: int,
    *,
    expert: int,
    tile: Tile,
    values: torch.Tensor,
) -> None:
    """Puts a tile into its tensor: a parameter of its own, or one expert of a stacked one."""
    part = block.parts[number]
    name, shape = part.name, part.shape or (1,)
    stacked = bool(block.experts) and "*" not in name
    if block.experts:
        name = name.replace("*", str(block.experts[expert]))
    if name not in whole:
        full = (block.count, *shape) if stacked else shape
        whole[name] = torch.empty(full, dtype=values.dtype)
        if not part.shape:
            whole[name] = whole[name].squeeze(-1)
    rows = whole[name][expert] if stacked else whole[name]
    copy_values(rows.view(shape)[tile.start : tile.stop], values.view(-1, *shape[1:]))
