"""Owns which free blocks a table gets: any of them, those unused longest first. The default one.

Also what any allocator must offer. Allocators know tables and blocks, and no other group.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from firstlight.cache.block_stock import BlockStock
from firstlight.cache.block_table import Table

PAGED, DYNAMIC = "paged", "dynamic"
ALLOCATORS = (PAGED, DYNAMIC)


class Demand(NamedTuple):
    """What a new table needs on the device: the blocks that were `found` for its first tokens (None
    for one that arrives from outside), `num_new` behind them at once, and `num_expected` in all
    for the tokens that are known.
    """

    found: Sequence[int | None]
    num_new: int
    num_expected: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the table at once."""
        return len(self.found) + self.num_new


class Allocator(Protocol):
    """Where the blocks of tables lie. Whoever asks compares the free blocks with `cost` first."""

    @property
    def num_copied(self) -> int:
        """Blocks that were copied on the device since the start."""
        ...

    def usable(self, found: Sequence[int | None]) -> int:
        """How many of these found blocks, from the first on, a table can always be opened with when
        nobody else holds any.
        """
        ...

    def cost(self, demand: Demand) -> int:
        """Free blocks that `open` and the first `extend` take."""
        ...

    def can_open(self, demand: Demand) -> bool:
        """Whether `open` and the first `extend` would find blocks, if there are as many free."""
        ...

    def open(self, demand: Demand) -> list[int]:
        """Takes blocks with the content of those that were found, and for what arrives."""
        ...

    def can_extend(self, name: str, num_blocks: int) -> bool:
        """Whether `extend` would find blocks, if there are as many free."""
        ...

    def extend(self, name: str, num_blocks: int) -> list[int]:
        """Takes blocks that follow those of a table; other blocks may get other numbers."""
        ...

    def close(self, blocks: Sequence[int]) -> None:
        """Gives back blocks of one table, in token order."""
        ...

    def check_integrity(self) -> None:
        """Checks that tables hold blocks as they should."""
        ...


class PagedAllocator:
    """Blocks of a table lie anywhere; equal content is shared where it lies."""

    num_copied = 0

    def __init__(self, stock: BlockStock, tables: dict[str, Table]) -> None:
        self._stock, self._tables = stock, tables

    def usable(self, found: Sequence[int | None]) -> int:
        """All of them."""
        return len(found)

    def cost(self, demand: Demand) -> int:
        """Shared blocks are free of charge only while somebody else holds them."""
        references = self._stock.pool.references
        used = sum(1 for block in demand.found if block is not None and references(block))
        return demand.num_blocks - used

    def can_open(self, demand: Demand) -> bool:
        """Any free block will do."""
        return True

    def open(self, demand: Demand) -> list[int]:
        """Shared blocks are taken first, so that the new ones cannot evict them."""
        for block in demand.found:
            if block is not None:
                self._stock.share(block)
        return [self._stock.take() if block is None else block for block in demand.found]

    def can_extend(self, name: str, num_blocks: int) -> bool:
        """Any free block will do."""
        return True

    def extend(self, name: str, num_blocks: int) -> list[int]:
        """Takes the blocks that were unused longest."""
        blocks = [self._stock.take() for _ in range(num_blocks)]
        self._tables[name].blocks += blocks
        return blocks

    def close(self, blocks: Sequence[int]) -> None:
        """The last block first: the end of a prefix is evicted before its start."""
        for block in reversed(blocks):
            self._stock.release(block)

    def check_integrity(self) -> None:
        """Blocks may lie anywhere."""
