"""Owns the blocks of one cache group with what they hold: which are free, and which can be found.

Knows no request and no order of blocks; which are taken is the allocator's choice.
"""

from collections.abc import Callable

from firstlight.cache.block_pool import BlockPool
from firstlight.cache.far_pool import FarPool
from firstlight.cache.idle_times import IdleTimes
from firstlight.cache.prefix_index import PrefixIndex

# Counting free blocks in a row looks at every block.
SECONDS_BETWEEN = 1.0


class BlockStock:
    """A pool of blocks, an index of their content, and since when what is findable lies unused.

    `num_cached` are free and findable. What is findable in a block that is taken goes out of the
    device, if there is a place.
    """

    def __init__(
        self, num_blocks: int, *, clock: Callable[[], float], far: FarPool | None = None
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.far = far
        self.idle = IdleTimes(num_blocks, clock)
        self.num_cached = 0
        self._clock = clock
        self._longest_run, self._counted_at = 0, float("-inf")

    def longest_free_run(self) -> int:
        """The most free blocks in a row when they were counted last, at most a second ago."""
        if self._clock() - self._counted_at >= SECONDS_BETWEEN:
            self._longest_run, self._counted_at = self.pool.longest_free_run, self._clock()
        return self._longest_run

    def take(self) -> int:
        """Takes the free block that was unused longest."""
        block = self.pool.acquire()
        self._evict(block)
        return block

    def take_at(self, block: int) -> None:
        """Takes this free block."""
        assert self.pool.references(block) == 0, f"block {block} is in use"
        self.pool.share(block)
        self._evict(block)

    def share(self, block: int) -> None:
        """Adds a holder to a block whose content is to be kept, be it free or in use."""
        if self.pool.references(block) == 0:
            self.num_cached -= 1
            self.idle.reuse(block)
        self.pool.share(block)

    def release(self, block: int) -> None:
        """Takes a holder away; what is findable of a block without holders stays so."""
        findable = block in self.index
        self.pool.release(block, keep=findable)
        if findable and self.pool.references(block) == 0:
            self.num_cached += 1
            self.idle.rest(block)

    def drop(self, block: int) -> None:
        """Makes a block unfindable."""
        if self.index.discard(block) and self.pool.references(block) == 0:
            self.num_cached -= 1
            self.pool.reuse_next(block)

    def move(self, source: int, target: int) -> None:
        """Puts a free block in the place of one with one holder, and makes what it held findable
        there; the copy is the caller's to order, after this.
        """
        assert self.pool.references(source) == 1, f"block {source} has not one holder"
        self.take_at(target)
        key = self.index.key_of(source)
        if key is not None:
            self.index.discard(source)
            self.index.enter(key, target)
        self.pool.release(source, keep=False)

    def forget(self) -> None:
        """Makes nothing findable; no block may be held."""
        for block in self.index.clear():
            self.pool.reuse_next(block)
        self.num_cached = 0

    def check_integrity(self) -> None:
        """Recounts the pool, the index, and what is findable and free."""
        self.pool.check_integrity()
        self.index.check_integrity()
        findable = [block for block in range(self.pool.num_blocks) if block in self.index]
        num_cached = sum(1 for block in findable if not self.pool.references(block))
        assert num_cached == self.num_cached, f"{num_cached} cached, {self.num_cached} counted"

    def _evict(self, block: int) -> None:
        key = self.index.key_of(block)
        if key is not None:
            if self.far is not None:
                self.far.keep(key, block)
            self.index.discard(block)
            self.num_cached -= 1
            self.idle.evict(block)
