"""Owns the block tables of one cache group whose state grows by a row per token.

Knows no tensor, no other group and no policy; the manager keeps the groups in step.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from firstlight.cache.allocator import Allocator, Demand, PagedAllocator
from firstlight.cache.arrivals import Arrival, Arrivals
from firstlight.cache.block_pool import NULL_BLOCK
from firstlight.cache.block_stock import BlockStock
from firstlight.cache.block_table import Table
from firstlight.cache.cache_group import GroupUsage, count_units
from firstlight.cache.dynamic_allocator import DynamicAllocator
from firstlight.cache.far_pool import FarPool
from firstlight.cache.far_prefix import FoundBlocks, num_spared
from firstlight.cache.moves import Moves
from firstlight.cache.prefix_index import PrefixChain, PrefixKey
from firstlight.sharding.state_spec import StateSpec

# Of a table that is opened this part of the known tokens is kept free for the answer, if it can be.
ANSWER_SHARE = 4


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
        self._stock = BlockStock(num_blocks, clock=clock, far=far)
        self._pool, self._index = self._stock.pool, self._stock.index
        self._found = FoundBlocks(self._index, far, self._pool.num_usable)
        self._tables: dict[str, Table] = {}
        self._allocator: Allocator = PagedAllocator(self._stock, self._tables)
        self._num_hits = 0
        if self._window is not None and chunk_tokens is not None:
            most = most_blocks_held(self._window, chunk_tokens, block_size) + self._num_sinks
            self.most_held = most if most <= self._pool.num_usable else None

    def lie_in_rows(self, moves: Moves, *, group: int) -> None:
        """Has the blocks of every table lie in a row from now on; `group` is what copies name. A
        group with a window holds few blocks, whatever the length, and leaves them where they are.
        """
        assert not self._tables, "the allocator is chosen under a running request"
        if self._window is None:
            self._allocator = DynamicAllocator(
                self._stock,
                self._tables,
                moves,
                group=group,
                is_arriving=lambda name: bool(self.arrivals.of(name)),
            )

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
            found = self._found.usable_length(chain, found)
            lead, shared = self._lead(chain, found), self._shared(chain, found)
            return (lead + self._allocator.usable(shared)) * self._block_size
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
        """What the allocator takes for the shared blocks and those behind them."""
        return self._allocator.cost(self._demand(chain, num_shared, num_blocks))

    def can_start(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> bool:
        """Whether blocks can be had where they are to lie, if there are as many free."""
        return self._allocator.can_open(self._demand(chain, num_shared, num_blocks))

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
        """Opens a table. What lies outside the device is held before anything is taken, so that
        nothing of it is given up for what goes out.

        Blocks that are found outside the device alone arrive in new ones. `parked` is where the
        content of the block behind the shared ones lies; the table takes its holder over.
        """
        assert request_id not in self._tables, f"{request_id} already has a block table"
        demand, seen = self._demand(chain, num_shared, num_blocks), self._seen(chain, num_shared)
        units = self._hold_far(chain, num_shared, demand.found)
        lead = self._found.hold_lead(chain, num_shared) if self._window is None else []
        self._num_hits += len(seen)
        num_behind = min(num_shared, self._first_seen(num_shared * self._block_size))
        table = Table([NULL_BLOCK] * num_shared, num_behind, num_sinks=self._num_sinks)
        table.blocks[: len(lead)], table.num_far = lead, len(lead)
        table.goal = demand.num_expected + demand.num_expected // ANSWER_SHARE + 1
        opened = self._allocator.open(demand)
        self._tables[request_id] = table
        for index, block, found in zip(seen, opened, demand.found, strict=True):
            table.blocks[index] = block
            if found is not None and found != block:
                table.copied[index] = chain.key(index)
        self.extend(request_id, num_blocks - num_shared)
        for index, unit in units.items():
            self.arrivals.add(request_id, Arrival(unit, table.blocks[index], chain.key(index)))
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

    def can_extend(self, request_id: str, num_blocks: int) -> bool:
        """Whether blocks can be had where they are to lie, if there are as many free."""
        return self._allocator.can_extend(request_id, num_blocks)

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """Adds blocks to a table and returns them; whatever they held is no longer findable."""
        return self._allocator.extend(request_id, num_blocks)

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
            self._stock.release(table.blocks[index])
            table.blocks[index] = unit
            table.copied.pop(index, None)
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
            self._stock.release(block)
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
        keys = [key for block in table.held if (key := self._index.key_of(block)) is not None]
        keys += [*table.keys_behind, *table.copied.values()]
        table.copied.clear()
        if self.far is not None:
            beyond = [self.far.key_of(unit) for unit in table.blocks[: table.num_far]]
            for far_key in (*keys, *beyond):
                if far_key is not None:
                    self.far.discard(far_key)
        for key in keys:
            found = self._index.find(key)
            if found is not None:
                self._stock.drop(found)

    def forget(self) -> None:
        """Makes nothing findable."""
        assert not self._tables, "content is forgotten under a running request"
        self._stock.forget()

    def release(self, request_id: str) -> None:
        """Closes a table. What was copied for it can be found in it, if nowhere else any more."""
        table = self._tables.pop(request_id)
        self.arrivals.finish(request_id)
        for index, key in table.copied.items():
            self._index.enter(key, table.blocks[index])
        self._allocator.close(table.held)
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
            cached=self._stock.num_cached,
            hits=self._num_hits,
            idle=self._stock.idle,
        )._replace(copied=self._allocator.num_copied, longest_run=self._stock.longest_free_run())

    def check_integrity(self, num_committed: dict[str, int]) -> None:
        """Recounts references from the tables and checks that shared blocks are full and clean."""
        self._stock.check_integrity()
        self._allocator.check_integrity()
        assert self._tables.keys() == num_committed.keys(), "tables and holdings differ"
        assert self.arrivals.requests <= self._tables.keys(), "blocks arrive for nobody"
        held = {name: table.held for name, table in self._tables.items()}
        holders = Counter(block for blocks in held.values() for block in blocks)
        for block in range(self._pool.num_blocks):
            counted, kept = holders[block], self._pool.references(block)
            assert counted == kept, f"block {block} is in {counted} tables, {kept} references kept"
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

    def _demand(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> Demand:
        lead = self._lead(chain, num_shared)
        known = -(-(chain.num_tokens + 1) // self._block_size) - lead
        expected = min(known, self._pool.num_usable)
        return Demand(self._shared(chain, num_shared), num_blocks - num_shared, expected)

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
