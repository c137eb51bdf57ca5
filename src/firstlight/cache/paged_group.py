"""Owns the block tables of one cache group whose state grows by a row per token.

Knows no tensor, no other group and no policy; the manager keeps the groups in step.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from firstlight.cache.arrivals import Arrival, Arrivals
from firstlight.cache.block_pool import NULL_BLOCK, BlockPool
from firstlight.cache.block_table import Table
from firstlight.cache.cache_group import GroupUsage, count_units
from firstlight.cache.far_pool import FarPool
from firstlight.cache.far_prefix import FoundBlocks, num_spared
from firstlight.cache.idle_times import IdleTimes
from firstlight.cache.prefix_index import PrefixChain, PrefixIndex, PrefixKey
from firstlight.sharding.state_spec import StateSpec


def window_of(spec: StateSpec) -> int | None:
    """How many tokens up to its own a token of this state sees; None for all."""
    window: int | None = getattr(spec, "window", None)
    return window


def sink_blocks(spec: StateSpec, block_size: int) -> int:
    """Blocks of the first tokens, which are seen beside a window."""
    sinks: int = getattr(spec, "sinks", 0)
    return -(-sinks // block_size)


def most_blocks_held(window: int, chunk_tokens: int, block_size: int) -> int:
    """Blocks that one request holds at most while it computes `chunk_tokens` at a time: those that
    touch the chunk and the `window` - 1 tokens before it, wherever blocks begin.
    """
    length = window - 1 + chunk_tokens
    return 1 if length < 2 else (length - 2) // block_size + 2


def group_blocks(spec: StateSpec, num_blocks: int, window_blocks: Mapping[int, int]) -> int:
    """Blocks of one paged group, where all that are not named by their window have `num_blocks`."""
    window = window_of(spec)
    return num_blocks if window is None else window_blocks.get(window, num_blocks)


class PagedGroup:
    """Layers that keep keys and values, or a latent, per token: block i holds [i*B, (i+1)*B).

    With a window, a token at position p sees (p - window, p] only, so blocks behind that are given
    back as a request grows, and what one request holds is bounded:

        tokens    0 ........ | p - window + 1 ...... p ...... p + chunk
        blocks    null       | held                  written next

    The blocks of the first `sinks` tokens stay held. Given-back blocks stay findable until they are
    taken, and a prefix can be reused where its last window is found. `most_held` is the bound;
    None without one, and when all blocks together are fewer: then a request must fit whole.

    Without a window the oldest blocks of a long request may lie outside the device: the table then
    names units there, and layers read them from where they are.
    """

    def __init__(
        self,
        spec: StateSpec,
        *,
        num_blocks: int,
        block_size: int,
        chunk_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        far: FarPool | None = None,
    ) -> None:
        self.spec = spec
        self.far = far
        self.arrivals = Arrivals(far)
        self.most_held: int | None = None
        self._window = window_of(spec)
        self._block_size = block_size
        self._num_sinks = sink_blocks(spec, block_size)
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._found = FoundBlocks(self._index, far, self._pool.num_usable)
        self._tables: dict[str, Table] = {}
        self._num_hits = 0
        self._idle = IdleTimes(num_blocks, clock)
        self._num_cached = 0  # free blocks that are still findable
        if self._window is not None and chunk_tokens is not None:
            most = most_blocks_held(self._window, chunk_tokens, block_size) + self._num_sinks
            self.most_held = most if most <= self._pool.num_usable else None

    @property
    def num_usable(self) -> int:
        """Blocks that requests may hold."""
        return self._pool.num_usable

    @property
    def most_blocks(self) -> int:
        """Blocks that one request may hold, those outside the device included."""
        beyond = self.far.num_usable if self.far is not None and self._window is None else 0
        return self._pool.num_usable + beyond

    @property
    def most_at_start(self) -> int | None:
        """Blocks of the device that a request has to find free at most; None for as many as it is
        long.
        """
        return self.most_held if self.far is None else self.most_held or self._pool.num_usable

    @property
    def far_held(self) -> list[int]:
        """The units outside the device that tables name, once for each table."""
        return [u for table in self._tables.values() for u in table.blocks[: table.num_far]]

    def far_users(self, unit: int) -> set[str]:
        """The requests whose tables name a unit outside the device."""
        tables = self._tables.items()
        return {name for name, table in tables if unit in table.blocks[: table.num_far]}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self._pool.num_free

    def holds(self, key: PrefixKey, *, near: bool = False) -> bool:
        """Whether the block of this content can be found; `near`: on the device."""
        if self._index.find(key) is not None:
            return True
        return not near and self.far is not None and self.far.find(key) is not None

    def reusable_tokens(self, chain: PrefixChain, at_most: int, *, near: bool = False) -> int:
        """The longest prefix of full blocks of which all that the next token sees are found."""
        most = at_most // self._block_size
        if self._window is None:
            found = 0
            while found < most and self.holds(chain.key(found), near=near):
                found += 1
            return self._found.usable_length(chain, found) * self._block_size
        firsts = [self.holds(chain.key(i), near=near) for i in range(min(self._num_sinks, most))]
        most = firsts.index(False) if False in firsts else most
        # From the end: a block that is missing rules out every length whose window it is in.
        length = block = most
        while length > 0 and block > self._first_seen(length * self._block_size):
            block -= 1
            if not self.holds(chain.key(block), near=near):
                length = block
        return length * self._block_size

    def cost(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> int:
        """Shared blocks are free of charge only while somebody else holds them."""
        shared = self._shared(chain, num_shared)
        used = sum(1 for block in shared if block is not None and self._pool.references(block))
        return len(shared) - used + num_blocks - num_shared

    def far_units(self, chain: PrefixChain, num_shared: int) -> list[int]:
        """Where those of the first blocks lie that are found outside the device alone."""
        if self.far is None:
            return []
        pairs = zip(self._seen(chain, num_shared), self._shared(chain, num_shared), strict=True)
        found = [self.far.find(chain.key(index)) for index, block in pairs if block is None]
        return [unit for unit in found if unit is not None]

    def growth(self, request_id: str, num_blocks: int) -> int:
        """Blocks to be taken at once to grow by `num_blocks`, chunk by chunk."""
        table = self._tables[request_id]
        if self.most_held is None:
            is_long = len(table.blocks) + num_blocks > self.num_usable
            if not is_long or self.far is None or self._window is not None:
                return num_blocks
            most = self.num_usable - num_spared(self.num_usable)
            return min(num_blocks, max(0, most - len(table.blocks) + table.num_far))
        return max(0, min(num_blocks, self.most_held - len(table.held)))

    def start(
        self,
        request_id: str,
        chain: PrefixChain,
        num_shared: int,
        num_blocks: int,
        parked: int | None = None,
    ) -> list[int]:
        """Opens a table. Shared blocks are taken first, so that the new ones cannot evict them.

        Blocks that are found outside the device alone arrive in new ones. `parked` is where the
        content of the block behind the shared ones lies; the table takes its holder over.
        """
        assert request_id not in self._tables, f"{request_id} already has a block table"
        shared = self._shared(chain, num_shared)
        for block in shared:
            if block is not None:
                self._share(block)
        units = self._hold_far(chain, num_shared, shared)
        lead = self._found.hold_lead(chain, num_shared) if self._window is None else []
        self._num_hits += len(shared)
        num_behind = min(num_shared, self._first_seen(num_shared * self._block_size))
        table = Table([NULL_BLOCK] * num_shared, num_behind, num_sinks=self._num_sinks)
        self._tables[request_id] = table
        table.blocks[: len(lead)], table.num_far = lead, len(lead)
        for index, block in zip(self._seen(chain, num_shared), shared, strict=True):
            near = self._take() if block is None else block
            table.blocks[index] = near
            if block is None:
                self.arrivals.add(request_id, Arrival(units[index], near, chain.key(index)))
        self.extend(request_id, num_blocks - num_shared)
        if parked is not None:
            self.arrivals.add(request_id, Arrival(parked, table.blocks[num_shared], None))
        return list(table.blocks)

    def arrive(self, request_id: str) -> None:
        """Makes blocks that have arrived findable, unless equal content already is."""
        for arrival in self.arrivals.finish(request_id):
            if arrival.key is not None:
                self._index.enter(arrival.key, arrival.target)

    def park(self, request_id: str, index: int) -> int | None:
        """Copies one block of a table out of the device; returns where its copy lies, which the
        caller holds, or None without room.
        """
        assert self.far is not None, "there is no place outside the device"
        return self.far.store(self._tables[request_id].blocks[index])

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """Adds blocks to a table and returns them; whatever they held is no longer findable."""
        blocks = [self._take() for _ in range(num_blocks)]
        self._tables[request_id].blocks += blocks
        return blocks

    def spill(self, request_id: str, chain: PrefixChain, blocks: range) -> list[tuple[int, int]]:
        """Moves blocks of a table, the oldest on the device, out of it as far as there is room;
        returns the place of each in the table and the unit it has become.
        """
        table, moved = self._tables[request_id], []
        if self.far is None or self._window is not None:
            return []
        assert blocks.start == table.num_far, "younger blocks go out before older ones"
        for index in blocks:
            unit = self.far.take_over(chain.key(index), table.blocks[index])
            if unit is None:
                break
            self._release(table.blocks[index])
            table.blocks[index] = unit
            table.num_far += 1
            moved.append((index, unit))
        return moved

    def num_far(self, request_id: str) -> int:
        """Blocks of a table that lie outside the device."""
        return self._tables[request_id].num_far

    def give_back(self, request_id: str, num_computed: int) -> None:
        """Gives back the blocks that no token behind the computed ones sees."""
        table, first = self._tables[request_id], self._first_seen(num_computed)
        for index in range(max(table.num_behind, self._num_sinks), first):
            block, table.blocks[index] = table.blocks[index], NULL_BLOCK
            key = self._index.key_of(block)
            if key is not None:
                table.keys_behind.append(key)
            self._release(block)
        table.num_behind = max(table.num_behind, first)

    def enter(self, request_id: str, chain: PrefixChain, blocks: range) -> None:
        """Makes these blocks of the table findable, unless equal content already is."""
        table = self._tables[request_id]
        for index in blocks:
            assert index >= table.num_behind, "a block was given back before it was committed"
            self._index.enter(chain.key(index), table.blocks[index])

    def discard(self, request_id: str) -> None:
        """Makes every block of the table unfindable, shared and given-back ones included."""
        table = self._tables[request_id]
        held = table.held
        keys = [key for block in held if (key := self._index.key_of(block)) is not None]
        if self.far is not None:
            beyond = [self.far.key_of(unit) for unit in table.blocks[: table.num_far]]
            for far_key in (*keys, *table.keys_behind, *beyond):
                if far_key is not None:
                    self.far.discard(far_key)
        for block in held:
            self._index.discard(block)
        for key in table.keys_behind:
            found = self._index.find(key)
            if found is not None:
                self._index.discard(found)
                if self._pool.references(found) == 0:
                    self._num_cached -= 1
                    self._pool.reuse_next(found)

    def forget(self) -> None:
        """Makes nothing findable."""
        assert not self._tables, "content is forgotten under a running request"
        for block in self._index.clear():
            self._pool.reuse_next(block)
        self._num_cached = 0

    def release(self, request_id: str) -> None:
        """Closes a table, last block first: the end of a prefix is evicted before its start."""
        table = self._tables.pop(request_id)
        self.arrivals.finish(request_id)
        for block in reversed(table.held):
            self._release(block)
        for unit in reversed(table.blocks[: table.num_far]):
            assert self.far is not None, "there is no place outside the device"
            self.far.release(unit)

    def table(self, request_id: str) -> Sequence[int]:
        """The blocks of a request in token order, null blocks where it holds none any more."""
        return tuple(self._tables[request_id].blocks)

    def usage(self) -> GroupUsage:
        """How many blocks are in which condition."""
        return count_units(
            self.spec.kind,
            self._pool,
            cached=self._num_cached,
            hits=self._num_hits,
            idle=self._idle,
        )

    def check_integrity(self, num_committed: dict[str, int]) -> None:
        """Recounts references from the tables and checks that shared blocks are full and clean."""
        self._pool.check_integrity()
        self._index.check_integrity()
        assert self._tables.keys() == num_committed.keys(), "tables and holdings differ"
        assert self.arrivals.requests <= self._tables.keys(), "blocks arrive for nobody"
        held = {name: table.held for name, table in self._tables.items()}
        holders = Counter(block for blocks in held.values() for block in blocks)
        for block in range(self._pool.num_blocks):
            counted, kept = holders[block], self._pool.references(block)
            assert counted == kept, f"block {block} is in {counted} tables, {kept} references kept"
        findable = [block for block in range(self._pool.num_blocks) if block in self._index]
        num_cached = sum(1 for block in findable if not holders[block])
        assert num_cached == self._num_cached, f"{num_cached} cached, {self._num_cached} counted"
        for request_id, table in self._tables.items():
            blocks = held[request_id]
            assert len(set(blocks)) == len(blocks), f"{request_id} holds a block twice"
            behind = table.blocks[table.num_sinks : table.num_behind]
            assert not any(behind), "a block behind a window is named"
            assert self.most_held is None or len(blocks) <= self.most_held, "a window is too wide"
            for block in table.blocks[max(num_committed[request_id], table.num_behind) :]:
                assert holders[block] == 1, f"block {block} is shared while it is written"
                assert block not in self._index, f"block {block} is findable while it is written"

    def _first_seen(self, num_tokens: int) -> int:
        """The first block that the token behind so many sees."""
        if self._window is None:
            return 0
        return max(0, num_tokens - self._window + 1) // self._block_size

    def _release(self, block: int) -> None:
        findable = block in self._index
        self._pool.release(block, keep=findable)
        if findable and self._pool.references(block) == 0:
            self._num_cached += 1
            self._idle.rest(block)

    def _take(self) -> int:
        """Takes a free block; what can be found in it goes out of the device, if it can."""
        block = self._pool.acquire()
        key = self._index.key_of(block)
        if key is not None:
            if self.far is not None:
                self.far.keep(key, block)
            self._index.discard(block)
            self._num_cached -= 1
            self._idle.evict(block)
        return block

    def _share(self, block: int) -> None:
        if self._pool.references(block) == 0:
            self._num_cached -= 1
            self._idle.reuse(block)
        self._pool.share(block)

    def _hold_far(
        self, chain: PrefixChain, num_shared: int, shared: Sequence[int | None]
    ) -> dict[int, int]:
        """Holds the units of blocks that are not on the device, by their place in the table."""
        units: dict[int, int] = {}
        for index, block in zip(self._seen(chain, num_shared), shared, strict=True):
            if block is None:
                unit = None if self.far is None else self.far.find(chain.key(index))
                assert unit is not None, "cached tokens are claimed that lookup did not report"
                units[index] = self.arrivals.hold(unit)
        return units

    def _seen(self, chain: PrefixChain, num_shared: int) -> list[int]:
        """The shared blocks that the token behind them sees and that are to be on the device."""
        first = self._first_seen(num_shared * self._block_size)
        sinks = range(min(self._num_sinks, first, num_shared))
        return [*sinks, *range(max(first, self._lead(chain, num_shared)), num_shared)]

    def _lead(self, chain: PrefixChain, num_shared: int) -> int:
        """How many of the oldest shared blocks are read from where they lie beyond the device."""
        return self._found.lead(chain, num_shared) if self._window is None else 0

    def _shared(self, chain: PrefixChain, num_shared: int) -> list[int | None]:
        """The blocks of a prefix that the next token sees; None for one not on the device."""
        return [self._index.find(chain.key(index)) for index in self._seen(chain, num_shared)]
