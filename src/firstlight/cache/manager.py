"""Owns how many tokens of each request are held and reusable, one number for all cache groups.

Knows no tensor, no queue and no policy: whom to serve or to preempt is the scheduler's decision.
"""

from collections.abc import Iterable, Mapping, Sequence

from firstlight.cache.cache_group import BlockCounts, CacheGroup, CacheUsage, SlotCopy
from firstlight.cache.cache_options import CacheOptions, Holding
from firstlight.cache.cacheable_request import CacheableRequest
from firstlight.cache.found_tokens import FoundTokens
from firstlight.cache.make_groups import check_specs, make_groups, near_units
from firstlight.cache.moves import Moves, UnitMove
from firstlight.cache.paged_group import PagedGroup
from firstlight.cache.prefix_index import PrefixChain, PrefixKey, PrefixScope
from firstlight.cache.recurrent_group import RecurrentGroup
from firstlight.cache.snapshot_planner import SnapshotPlanner
from firstlight.cache.tiers import Spilling, Tiers
from firstlight.errors import UsageError
from firstlight.sharding.state_spec import StateSpec

# Of a cache that holds any length: more than a request can have.
UNBOUNDED_BLOCKS = 2**40


def distinct_specs(specs: Iterable[StateSpec | None]) -> list[StateSpec]:
    """The cache groups of a model's layers: each spec once, in the order of first use."""
    return list(dict.fromkeys(spec for spec in specs if spec is not None))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens; the planner rounds with this function too."""
    return -(-num_tokens // block_size)


class CacheManager:
    """Block tables and state slots of all requests, group by group, and reuse of equal prefixes.

    Each paged group has `num_blocks` blocks of `block_size` tokens, block 0 reserved, but for those
    with a window, which give back what lies behind it and may have fewer. Only blocks whose tokens
    were all committed can be found by other requests, and nobody writes to a committed block:
    sharing needs no copies and no locks. Two requests that compute equal content at once each write
    their own blocks; the first to commit is the one found later.

    Each recurrent group has `num_slots` slots, slot 0 reserved: a live one per request, whose state
    advances with every token, and snapshots of it, copies made at the ends of blocks that
    SnapshotPoints names (every `turn_tokens` of output at most). All groups agree on one count of
    computed tokens, so with recurrent state a prefix is reused only as far as a snapshot and every
    block before it are found.

    Raises ConfigError for state that this cache cannot hold, OutOfBudget for fewer than 2 blocks or
    slots.
    """

    def __init__(
        self,
        groups: Sequence[StateSpec],
        *,
        num_blocks: int,
        block_size: int,
        model_digest: str,
        num_slots: int = 0,
        options: CacheOptions | None = None,
    ) -> None:
        if block_size < 1:
            raise UsageError(f"the block size is {block_size} tokens; it must be at least 1")
        check_specs(groups)
        self.block_size = block_size
        self._model_digest = model_digest
        options = options or CacheOptions()
        moves = Moves()
        made = make_groups(
            groups,
            near_units(groups, num_blocks, num_slots, options),
            moves,
            block_size=block_size,
            options=options,
            holds_pages=self._holds_pages,
        )
        self._paged = {i: group for i, group in enumerate(made) if isinstance(group, PagedGroup)}
        self._recurrent = {i: g for i, g in enumerate(made) if isinstance(g, RecurrentGroup)}
        self._groups: list[CacheGroup] = list(made)
        self._holdings: dict[str, Holding] = {}
        self._snapshots = SnapshotPlanner(
            self._paged, self._recurrent, self._holdings, block_size=block_size, options=options
        )
        self._unit_bytes = options.unit_bytes or (0,) * len(groups)
        self.tiers = Tiers(self._groups, moves, block_size=block_size, unit_bytes=self._unit_bytes)
        self._asked = FoundTokens(len(groups))
        unbounded = [group for group in self._paged.values() if group.most_held is None]
        most = min((group.most_blocks for group in unbounded), default=UNBOUNDED_BLOCKS)
        self.max_tokens = block_size * most
        self._near_blocks = min((g.num_usable for g in unbounded), default=UNBOUNDED_BLOCKS)

    @property
    def free_blocks(self) -> BlockCounts:
        """Blocks that can be taken now, cached ones included."""
        return BlockCounts(tuple(group.num_free for group in self._paged.values()))

    @property
    def can_start(self) -> bool:
        """Whether one more request would find a slot in every recurrent group."""
        return all(group.num_free for group in self._recurrent.values())

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a single request of so many tokens fits into the empty cache."""
        return num_tokens <= self.max_tokens

    def lookup(self, request: CacheableRequest, *, near: bool = False) -> int:
        """Tokens of a request without blocks that need no computation; takes nothing.

        Less than the known tokens: the last one is always computed, because its output is what the
        next token is chosen from. A multiple of the block size, but for a request that is parked.

            known    0 ................................ n-1
            cached   0 ...... c-1        c = k * B <= n - 1, found in every group

        `near` leaves out what lies outside the device.
        """
        chain, most = self._chain(request), _most_found(request)
        num_tokens = most // self.block_size * self.block_size
        # A group may hold state at single positions only, so all are asked again until nobody
        # objects. The number falls with each round, and 0 suits everybody. Pages come first: they
        # often end early, and then no key of the tokens behind has to be made.
        groups: list[CacheGroup] = [*self._paged.values(), *self._recurrent.values()]
        while True:
            asked = num_tokens
            for group in groups:
                num_tokens = group.reusable_tokens(chain, num_tokens, near=near)
            if num_tokens == asked:
                return num_tokens if near else max(num_tokens, self._resumable(request))

    def far_bytes(self, request: CacheableRequest, num_cached: int) -> Mapping[str, int]:
        """Bytes on one rank, by place, that must come to the device for what lookup reported."""
        return self.tiers.far_bytes(request.request_id, self._chain(request), num_cached)

    def stage(self, request: CacheableRequest) -> list[UnitMove]:
        """Takes units for the `num_computed` tokens that lookup just reported of a request without
        blocks, if some of them lie outside the device; returns the copies that bring them.

        Empty, and nothing taken, when all are there. `arrive` ends the copies, `release` drops
        them.
        """
        parked = self.tiers.parked(request.request_id)
        chain, num_shared = self._chain(request), request.num_computed // self.block_size
        units = parked.units if parked and parked.num_tokens == request.num_computed else {}
        if not units and not self.tiers.holds_part(chain, num_shared):
            return []
        taken = self._start(request, request.num_computed)
        assert taken is not None, "units are staged that were not asked for"
        return self.tiers.arrivals(request.request_id)

    def arrive(self, request: CacheableRequest) -> None:
        """Notes that all copies for a request have ended."""
        for group in self._groups:
            group.arrive(request.request_id)

    def park(self, request: CacheableRequest) -> bool:
        """Copies out what of a running request could not be found again; False without room."""
        return request.num_computed > 0 and self.tiers.park(
            request.request_id, request.num_computed
        )

    def needs(
        self, request: CacheableRequest, num_tokens: int, *, num_cached: int = 0
    ) -> BlockCounts:
        """Free blocks to be taken for the request to come to hold `num_tokens`, chunk by chunk.

        `num_cached` is what lookup said of a request without blocks.
        """
        num_blocks = blocks_for(num_tokens, self.block_size)
        holding, groups = self._holdings.get(request.request_id), self._paged.values()
        if holding is not None:
            more = max(0, num_blocks - holding.capacity // self.block_size)
            return BlockCounts(tuple(group.growth(request.request_id, more) for group in groups))
        chain, num_shared = self._chain(request), num_cached // self.block_size
        costs = [
            (group.cost(chain, num_shared, num_blocks), group.most_at_start) for group in groups
        ]
        return BlockCounts(tuple(c if most is None else min(c, most) for c, most in costs))

    def can_place(self, request: CacheableRequest, num_tokens: int, *, num_cached: int) -> bool:
        """Whether free blocks that a request without any `needs` can be had where they must lie."""
        chain, num_shared = self._chain(request), num_cached // self.block_size
        num_blocks = blocks_for(num_tokens, self.block_size)
        return all(group.can_start(chain, num_shared, num_blocks) for group in self._groups)

    def grow(self, request: CacheableRequest, num_tokens: int) -> list[list[int]] | None:
        """Makes the request hold `num_tokens`; returns the blocks it gained, one list a group.

        Empty when it gained none; None, and nothing taken, when they do not fit. Groups with a
        window give back what no token behind the computed ones sees. A request without blocks first
        shares those of its `num_computed` tokens, which lookup must just have
        reported. The list of a recurrent group is the request's live slot when it starts, and
        empty ever after; what is to be copied there is told by `take_restores`.
        """
        holding = self._holdings.get(request.request_id)
        if holding is None:
            return self._start(request, num_tokens)
        if num_tokens <= holding.capacity:
            return []
        num_blocks = blocks_for(num_tokens - holding.capacity, self.block_size)
        for paged in self._paged.values():
            paged.give_back(request.request_id, request.num_computed)
        for paged in self._paged.values():
            if num_blocks > paged.num_free or not paged.can_extend(request.request_id, num_blocks):
                return None
        holding.capacity += num_blocks * self.block_size
        return [group.extend(request.request_id, num_blocks) for group in self._groups]

    def most_at_once(self, request: CacheableRequest) -> int:
        """Tokens that can be computed of a request in one step, if all others yield."""
        written = request.num_computed % self.block_size
        return self._near_blocks * self.block_size - written

    def outgrows_device(self, request: CacheableRequest) -> bool:
        """Whether its known tokens are more than the device holds, beside the next one."""
        return len(request.token_ids) >= self._near_blocks * self.block_size

    def spill(self, request: CacheableRequest, num_tokens: int, *, spares: bool = False) -> bool:
        """Makes room for the request to hold `num_tokens` by moving its oldest blocks out of the
        device, and with `spares` the part of it that is left to others; False if that is not
        enough for its own.
        """
        if not self.tiers.exist:
            return False
        if request.request_id not in self._holdings:
            self._start(request, request.num_computed)
        holding, chain = self._holdings[request.request_id], self._chain(request)
        needed = blocks_for(num_tokens - holding.capacity, self.block_size)
        asked = Spilling(needed, holding.num_committed, spares)
        return self.tiers.spill(request.request_id, chain, asked)

    def take_restores(self) -> list[SlotCopy]:
        """Copies that requests started since the last call need before their first token.

        All sources are read before any target is written.
        """
        groups = self._recurrent.values()
        return [copy for group in groups for copy in group.take_restores()]

    def snapshot_point(self, request: CacheableRequest) -> int | None:
        """The position where the request's next step should end, if it gets there, so that its
        state can be kept. `SnapshotPoints` says which there are.

        None when all are passed, when their state is known, or when no slot could take it.
        """
        if not self._recurrent:
            return None
        point = self._snapshots.next_point(request, self._chain(request))
        return None if point is None else point.num_tokens

    def save(self, request: CacheableRequest, num_tokens: int) -> list[SlotCopy]:
        """Prepares snapshots if the step to be sent brings the request to its snapshot point.

        Returns the copies to be made after that step. `commit` makes them findable, `release` and
        `discard` drop them. To be called when nothing else of the step remains to be placed, so
        that a snapshot never takes the slot that a request would start in.
        """
        if not self._recurrent:
            return []
        return self._snapshots.save(request, self._chain(request), num_tokens)

    def commit(self, request: CacheableRequest, num_computed: int) -> None:
        """Makes the blocks within the first `num_computed` tokens findable, and the snapshot that
        was taken at that number.

        To be called only when the step that computed them came back clean.
        """
        holding = self._holdings[request.request_id]
        holding.num_computed = num_computed
        num_full = num_computed // self.block_size
        if num_full <= holding.num_committed:
            return
        assert num_computed <= holding.capacity, "tokens are committed that no block holds"
        blocks, chain = range(holding.num_committed, num_full), self._chain(request)
        for group in self._groups:
            group.enter(request.request_id, chain, blocks)
        holding.num_committed = num_full

    def release(self, request: CacheableRequest) -> None:
        """Gives back all blocks, if any; committed ones stay findable until they are reused."""
        self.tiers.moves.take_renumbered(request.request_id)
        if self._holdings.pop(request.request_id, None) is not None:
            for group in self._groups:
                group.release(request.request_id)

    def discard(self, request: CacheableRequest) -> None:
        """Gives back all blocks of a request whose numbers went wrong and lets none be found again.

        That includes blocks it found in the cache: if one of them is the cause, the next request of
        that prefix computes it anew instead of failing too.
        """
        if request.request_id in self._holdings:
            for group in self._groups:
                group.discard(request.request_id)
        self.release(request)

    def forget(self, model_digest: str | None = None) -> None:
        """Empties the cache, here and outside the device; no request may hold blocks.

        `model_digest` names other weights than before, and was never used.
        """
        self._model_digest = model_digest or self._model_digest
        for group in self._groups:
            group.forget()
            if group.far is not None:
                group.far.forget()

    def blocks(self, request: CacheableRequest) -> list[list[int]]:
        """The blocks a request holds in token order, one list a group."""
        if request.request_id not in self._holdings:
            return [[] for _ in self._groups]
        return [list(group.table(request.request_id)) for group in self._groups]

    def held_bytes(self, request: CacheableRequest) -> int:
        """Bytes on one rank of the units a request holds."""
        pairs = zip(self._groups, self._unit_bytes, strict=True)
        held = ((len(group.table(request.request_id)), size) for group, size in pairs)
        return sum(count * size for count, size in held)

    def usage(self) -> CacheUsage:
        """Counts units by condition; takes time for each request, none for each block."""
        free = [group.num_free for group in self._groups]
        unwritten = sum(held.capacity - held.num_computed for held in self._holdings.values())
        groups = tuple(
            group.usage()._replace(
                asked_tokens=self._asked.asked,
                found_tokens=self._asked.found[index],
                unwritten_tokens=unwritten if index in self._paged else 0,
                stranded=0 if min(free) else free[index],
                unit_bytes=self._unit_bytes[index],
                far=() if group.far is None else group.far.usage(),
            )
            for index, group in enumerate(self._groups)
        )
        return CacheUsage(self.block_size, len(self._holdings), groups)

    def check_integrity(self) -> None:
        """Recounts every group against what requests hold; for tests and idle moments."""
        committed = {key: holding.num_committed for key, holding in self._holdings.items()}
        for group in self._groups:
            group.check_integrity(committed)
        self.tiers.check_integrity()
        for group in self._paged.values():
            for request_id, holding in self._holdings.items():
                held = len(group.table(request_id)) * self.block_size
                assert held == holding.capacity, f"{request_id}: {held} tokens, not {holding}"

    def _start(self, request: CacheableRequest, num_tokens: int) -> list[list[int]] | None:
        chain, num_cached = self._chain(request), request.num_computed
        assert num_cached <= num_tokens
        num_shared = num_cached // self.block_size
        num_blocks = blocks_for(num_tokens, self.block_size)
        asked = chain, num_shared, num_blocks
        for group in self._groups:
            if group.cost(*asked) > group.num_free or not group.can_start(*asked):
                return None
        parked = self.tiers.unpark(request.request_id, num_cached)
        assert parked or num_cached % self.block_size == 0, "part of a block is claimed"
        points = self._snapshots.points(request, chain) if self._recurrent else None
        holding = Holding(num_blocks * self.block_size, num_shared, num_cached, points)
        most = _most_found(request) // self.block_size * self.block_size
        if most:
            self._asked.count(self._groups, chain, most)
        self._holdings[request.request_id] = holding
        return [
            group.start(request.request_id, chain, num_shared, num_blocks, parked.get(index))
            for index, group in enumerate(self._groups)
        ]

    def _resumable(self, request: CacheableRequest) -> int:
        """Tokens behind which a parked request can go on: all its full blocks must be found."""
        parked = self.tiers.parked(request.request_id)
        if parked is None or parked.num_tokens > _most_found(request):
            return 0
        full = parked.num_tokens // self.block_size * self.block_size
        chain, paged = self._chain(request), self._paged.values()
        found = all(group.reusable_tokens(chain, full) == full for group in paged)
        return parked.num_tokens if found else 0

    def _holds_pages(self, key: PrefixKey) -> bool:
        """Whether the block of every paged group that this key names can be found. It is the last
        one before a snapshot of that key, and of a prefix the last block goes first.
        """
        return all(group.holds(key) for group in self._paged.values())

    def _chain(self, request: CacheableRequest) -> PrefixChain:
        if request.prefix_chain is None:
            scope = PrefixScope(self._model_digest, self.block_size, request.salt)
            request.prefix_chain = PrefixChain(scope, request.token_ids, request.media)
        return request.prefix_chain


def _most_found(request: CacheableRequest) -> int:
    return min(len(request.token_ids) - 1, request.most_reused)
