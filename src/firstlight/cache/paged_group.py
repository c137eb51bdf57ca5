"""Owns the block tables of one cache group whose state grows by a row per token.

Knows no tensor, no other group and no policy; the manager keeps the groups in step.
"""

from collections import Counter
from collections.abc import Sequence

from firstlight.cache.block_pool import BlockPool
from firstlight.cache.cache_group import GroupUsage
from firstlight.cache.prefix_index import PrefixChain, PrefixIndex, PrefixKey
from firstlight.sharding.state_spec import StateSpec


class PagedGroup:
    """Layers that keep keys and values, or a latent, per token: block i holds [i*B, (i+1)*B).

    Layers with a window are charged in full: nothing is given back behind the window.
    """

    def __init__(self, spec: StateSpec, *, num_blocks: int, block_size: int) -> None:
        self.spec = spec
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._tables: dict[str, list[int]] = {}
        self._num_hits = 0
        self._num_evictions = 0
        self._num_cached = 0  # free blocks that are still findable

    @property
    def num_usable(self) -> int:
        """Blocks that requests may hold."""
        return self._pool.num_usable

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self._pool.num_free

    def holds(self, key: PrefixKey) -> bool:
        """Whether the block of this content can be found."""
        return self._index.find(key) is not None

    def reusable_tokens(self, chain: PrefixChain, at_most: int) -> int:
        """Counts full blocks from the start until one is not found."""
        num_found = 0
        while num_found < at_most // self._block_size:
            if self._index.find(chain.key(num_found)) is None:
                break
            num_found += 1
        return num_found * self._block_size

    def cost(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> int:
        """Shared blocks are free of charge only while somebody else holds them."""
        shared = self._shared(chain, num_shared)
        return num_blocks - sum(1 for block in shared if self._pool.references(block))

    def start(
        self, request_id: str, chain: PrefixChain, num_shared: int, num_blocks: int
    ) -> list[int]:
        """Opens a table. Shared blocks are taken first, so that the new ones cannot evict them."""
        assert request_id not in self._tables, f"{request_id} already has a block table"
        blocks = self._shared(chain, num_shared)
        for block in blocks:
            self._num_cached -= self._pool.references(block) == 0
            self._pool.share(block)
        self._num_hits += num_shared
        self._tables[request_id] = blocks
        self.extend(request_id, num_blocks - num_shared)
        return list(blocks)

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """Adds blocks to a table and returns them; whatever they held is no longer findable."""
        blocks = [self._pool.acquire() for _ in range(num_blocks)]
        num_evicted = sum(map(self._index.discard, blocks))
        self._num_evictions += num_evicted
        self._num_cached -= num_evicted
        self._tables[request_id] += blocks
        return blocks

    def enter(self, request_id: str, chain: PrefixChain, blocks: range) -> None:
        """Makes these blocks of the table findable, unless equal content already is."""
        table = self._tables[request_id]
        for block_index in blocks:
            self._index.enter(chain.key(block_index), table[block_index])

    def discard(self, request_id: str) -> None:
        """Makes every block of the table unfindable, the shared ones included."""
        for block in self._tables[request_id]:
            self._index.discard(block)

    def release(self, request_id: str) -> None:
        """Closes a table, last block first: the end of a prefix is evicted before its start."""
        for block in reversed(self._tables.pop(request_id)):
            findable = block in self._index
            self._pool.release(block, keep=findable)
            self._num_cached += findable and self._pool.references(block) == 0

    def table(self, request_id: str) -> Sequence[int]:
        """The blocks of a request in token order."""
        return tuple(self._tables[request_id])

    def usage(self) -> GroupUsage:
        """How many blocks are in which condition."""
        usable, free, cached = self._pool.num_usable, self._pool.num_free, self._num_cached
        return GroupUsage(
            kind=self.spec.kind,
            usable=usable,
            used=usable - free,
            cached=cached,
            empty=free - cached,
            hits=self._num_hits,
            evictions=self._num_evictions,
        )

    def check_integrity(self, num_committed: dict[str, int]) -> None:
        """Recounts references from the tables and checks that shared blocks are full and clean."""
        self._pool.check_integrity()
        self._index.check_integrity()
        assert self._tables.keys() == num_committed.keys(), "tables and holdings differ"
        holders = Counter(block for table in self._tables.values() for block in table)
        for block in range(self._pool.num_blocks):
            counted, kept = holders[block], self._pool.references(block)
            assert counted == kept, f"block {block} is in {counted} tables, {kept} references kept"
        findable = [block for block in range(self._pool.num_blocks) if block in self._index]
        num_cached = sum(1 for block in findable if not holders[block])
        assert num_cached == self._num_cached, f"{num_cached} cached, {self._num_cached} counted"
        for request_id, table in self._tables.items():
            assert len(set(table)) == len(table), f"{request_id} holds a block twice"
            for block in table[num_committed[request_id] :]:
                assert holders[block] == 1, f"block {block} is shared while it is written"
                assert block not in self._index, f"block {block} is findable while it is written"

    def _shared(self, chain: PrefixChain, num_shared: int) -> list[int]:
        found = [self._index.find(chain.key(block_index)) for block_index in range(num_shared)]
        blocks = [block for block in found if block is not None]
        assert len(blocks) == num_shared, "cached tokens are claimed that lookup did not report"
        return blocks
