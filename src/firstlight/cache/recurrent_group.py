"""Owns the slots of one cache group whose state has one size, however long the sequence is.

Knows no tensor, no other group and no policy. A slot holds the state behind a number of tokens, and
it cannot be taken back to fewer: what is to be reused must be copied while it is that state.

    tokens         0 ................ N-1 | N ........... n-1        N = k * B
    live slot      ----- advances ------> state of N ---> ...
    snapshot                              copy of it, found under the key of block k-1

One pool holds both. A live slot belongs to a running sequence. A snapshot belongs to nobody: it is
a free slot that can still be found, and the one worth least goes when a slot is needed.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firstlight.cache.arrivals import Arrival, Arrivals
from firstlight.cache.block_pool import BlockPool
from firstlight.cache.cache_group import GroupUsage, SlotCopy, count_units
from firstlight.cache.far_pool import FarPool
from firstlight.cache.idle_times import IdleTimes
from firstlight.cache.prefix_index import PrefixChain, PrefixIndex, PrefixKey
from firstlight.cache.snapshot_values import SnapshotValues
from firstlight.errors import OutOfBudget
from firstlight.sharding.state_spec import StateSpec


class Wish(NamedTuple):
    """How a snapshot is to be kept: instead of the last one of its turn, if no other request used
    that, and how many uses are expected of it.
    """

    is_turn: bool = False
    uses: int = 1


class Saving(NamedTuple):
    """A snapshot that the step under way makes: of which length in blocks, and in which slot."""

    num_blocks: int
    slot: int
    wish: Wish


@dataclass
class Live:
    """What a running sequence holds; `keys` are those of the snapshots it found or entered, `turn`
    is the slot of the last snapshot of its turn, as long as that is its own.
    """

    slot: int
    keys: list[PrefixKey] = field(default_factory=list)
    saving: Saving | None = None
    turn: tuple[int, PrefixKey] | None = None


class RecurrentGroup:
    """One live slot per running sequence, and snapshots in the slots that are left.

    `index` is the group's place among all groups, which copies carry; `holds_pages` says whether
    the pages before a snapshot can still be found by its key.

    Slot 0 is the null slot: it is never handed out, so padded rows of a batch may point at it.
    Within one plan all restores are read before any is written, then tokens are computed, then
    saves are copied; plans are carried out in order. A slot may therefore be given away in the very
    plan that restores from it, and as soon as a request is cancelled whose save is under way.
    """

    def __init__(
        self,
        spec: StateSpec,
        *,
        index: int,
        num_slots: int,
        block_size: int,
        holds_pages: Callable[[PrefixKey], bool] = lambda key: True,
        clock: Callable[[], float] = time.monotonic,
        far: FarPool | None = None,
    ) -> None:
        if num_slots < 2:
            raise OutOfBudget(
                f"{num_slots} slots of {spec.kind} state cannot serve a sequence: slot 0 is "
                "reserved, so at least 2 are needed; give the cache more memory"
            )
        self.spec = spec
        self.far = far
        self.arrivals = Arrivals(far)
        self._group = index
        self._block_size = block_size
        self._pool = BlockPool(num_slots)
        self._index = PrefixIndex()  # snapshots
        self._holds_pages = holds_pages
        self._values = SnapshotValues(holds_pages)
        self._live: dict[str, Live] = {}
        self._restores: list[SlotCopy] = []
        self._num_hits = 0
        self._idle = IdleTimes(num_slots, clock)

    @property
    def num_usable(self) -> int:
        """Slots that can be live."""
        return self._pool.num_usable

    @property
    def num_free(self) -> int:
        """Slots that can be taken now, those of snapshots included."""
        return self._pool.num_free

    def reusable_tokens(self, chain: PrefixChain, at_most: int, *, near: bool = False) -> int:
        """The longest snapshot of the prefix. There are few of them, so each is compared."""
        most = at_most // self._block_size
        lengths = self._values.lengths
        if self.far is not None and not near:
            lengths = lengths | self.far.lengths
        for num_blocks in sorted((n for n in lengths if n <= most), reverse=True):
            if self.has_snapshot(chain, num_blocks, near=near):
                return num_blocks * self._block_size
        return 0

    def has_snapshot(self, chain: PrefixChain, num_blocks: int, *, near: bool = False) -> bool:
        """Whether the state behind the first `num_blocks` blocks can be found; `near`: on the
        device.
        """
        key = chain.key(num_blocks - 1)
        if self._index.find(key) is not None:
            return True
        return not near and self.far is not None and self.far.find(key) is not None

    def far_units(self, chain: PrefixChain, num_shared: int) -> list[int]:
        """Where the snapshot to resume from lies, if that is outside the device alone."""
        if self.far is None or num_shared == 0:
            return []
        key = chain.key(num_shared - 1)
        unit = self.far.find(key) if self._index.find(key) is None else None
        return [] if unit is None else [unit]

    def cost(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> int:
        """One live slot, whatever the length."""
        return 1

    def can_start(self, chain: PrefixChain, num_shared: int, num_blocks: int) -> bool:
        """Any slot will do."""
        return True

    def start(
        self,
        request_id: str,
        chain: PrefixChain,
        num_shared: int,
        num_blocks: int,
        parked: int | None = None,
    ) -> list[int]:
        """Takes a live slot. When the last free slot is the snapshot to restore from, that slot
        itself becomes live and nothing is copied.

        A snapshot outside the device arrives in the live slot, and so does the state that lies at
        `parked`, whose holder the slot takes over.
        """
        assert request_id not in self._live, f"{request_id} already has a slot"
        if parked is not None:
            live = Live(self._acquire())
            self.arrivals.add(request_id, Arrival(parked, live.slot, None))
        elif num_shared == 0:
            live = Live(self._acquire())
        else:
            live = self._resume(request_id, chain.key(num_shared - 1))
        self._live[request_id] = live
        return [live.slot]

    def arrive(self, request_id: str) -> None:
        """Notes that a live slot has got its state."""
        self.arrivals.finish(request_id)

    def park(self, request_id: str) -> int | None:
        """Copies the live slot out of the device; returns where its copy lies, which the caller
        holds, or None without room.
        """
        assert self.far is not None, "there is no place outside the device"
        return self.far.store(self._live[request_id].slot)

    def extend(self, request_id: str, num_blocks: int) -> list[int]:
        """The live slot serves any length."""
        return []

    def take_restores(self) -> list[SlotCopy]:
        """The copies that sequences started since the last call need before their first token."""
        restores, self._restores = self._restores, []
        return restores

    def save(
        self, request_id: str, chain: PrefixChain, num_blocks: int, wish: Wish | None = None
    ) -> SlotCopy | None:
        """Prepares a snapshot of the state that the step under way ends with.

        Returns the copy to be made after it; None when there is such a snapshot or no free slot.
        """
        live, wish = self._live[request_id], wish or Wish()
        assert live.saving is None, f"{request_id} is saved twice in one step"
        if self.num_free == 0 or self.has_snapshot(chain, num_blocks):
            return None
        if wish.is_turn and not self._has_empty:
            self._drop_turn(live)  # rather than a snapshot of somebody else
        live.saving = Saving(num_blocks, self._acquire(), wish)
        return SlotCopy(self._group, live.slot, live.saving.slot)

    def enter(self, request_id: str, chain: PrefixChain, blocks: range) -> None:
        """Makes the snapshot that was under way findable, unless an equal one already is."""
        live = self._live[request_id]
        if live.saving is None:
            return
        (num_blocks, slot, wish), live.saving = live.saving, None
        assert num_blocks == blocks.stop, "a snapshot is entered at another length than its own"
        key = chain.key(num_blocks - 1)
        live.keys.append(key)
        self._index.enter(key, slot)
        is_entered = slot in self._index
        if is_entered:
            self._values.enter(slot, key, num_blocks=num_blocks, uses=wish.uses)
            self._idle.rest(slot)
        self._pool.release(slot, keep=is_entered)
        if wish.is_turn:
            self._drop_turn(live)
            live.turn = (slot, key) if is_entered else None

    def discard(self, request_id: str) -> None:
        """Makes the snapshots the request found or entered unfindable."""
        for key in self._live[request_id].keys:
            if self.far is not None:
                self.far.discard(key)
            slot = self._index.find(key)
            if slot is not None:
                self._drop(slot)

    def forget(self) -> None:
        """Drops every snapshot."""
        assert not self._live, "snapshots are forgotten under a running request"
        for slot in self._values.slots:
            self._drop(slot)

    def release(self, request_id: str) -> None:
        """Gives back the live slot and drops a snapshot that is under way."""
        live = self._live.pop(request_id)
        self.arrivals.finish(request_id)
        self._pool.release(live.slot, keep=False)
        if live.saving is not None:
            self._pool.release(live.saving.slot, keep=False)

    def table(self, request_id: str) -> Sequence[int]:
        """The live slot."""
        return (self._live[request_id].slot,)

    def usage(self) -> GroupUsage:
        """How many slots are live or being saved to, hold a snapshot, or are empty."""
        return count_units(
            self.spec.kind,
            self._pool,
            cached=len(self._index),
            hits=self._num_hits,
            idle=self._idle,
        )._replace(longest_run=self._pool.longest_free_run)

    def check_integrity(self, num_committed: dict[str, int]) -> None:
        """Recounts holders; a snapshot has none, so nobody can be writing to it."""
        self._pool.check_integrity()
        self._index.check_integrity()
        assert self._live.keys() == num_committed.keys(), "slots and holdings differ"
        assert self.arrivals.requests <= self._live.keys(), "state arrives for nobody"
        lives = self._live.values()
        holders = Counter(live.slot for live in lives)
        holders.update(live.saving.slot for live in lives if live.saving is not None)
        snapshots = {slot for slot in range(self._pool.num_blocks) if slot in self._index}
        assert snapshots == self._values.slots, "snapshots and their values differ"
        for slot in range(self._pool.num_blocks):
            counted, kept = holders[slot], self._pool.references(slot)
            assert counted == kept, f"slot {slot} has {counted} holders, {kept} references kept"
            assert counted <= (slot not in snapshots), f"slot {slot} is findable or held twice"
        assert not self._restores, "a restore was never handed out"

    def _resume(self, request_id: str, key: PrefixKey) -> Live:
        """A live slot that gets the state of a snapshot, before the tokens behind it come."""
        source = self._index.find(key)
        self._num_hits += 1
        if source is None:
            unit = None if self.far is None else self.far.find(key)
            assert unit is not None, "a snapshot is claimed that lookup did not report"
            unit = self.arrivals.hold(unit)
            live = Live(self._acquire(), [key])
            self.arrivals.add(request_id, Arrival(unit, live.slot, key))
            return live
        self._values.use(source)
        self._idle.reuse(source)
        self._idle.rest(source)
        live = Live(self._acquire(spare=source), [key])
        if live.slot != source:
            self._restores.append(SlotCopy(self._group, source, live.slot))
        return live

    @property
    def _has_empty(self) -> bool:
        return self._pool.num_free > len(self._index)

    def _acquire(self, *, spare: int | None = None) -> int:
        """Takes an empty slot if there is one, else that of the snapshot worth least; `spare` only
        when it is the last one.
        """
        if self._has_empty:
            return self._pool.acquire()
        slot = self._values.choose_victim(spare=spare)
        key = self._index.key_of(slot)
        if self.far is not None and key is not None and self._holds_pages(key):
            self.far.keep(key, slot, length=self._values.length(slot))
        self._forget(slot)
        self._idle.evict(slot)
        self._pool.share(slot)
        return slot

    def _drop_turn(self, live: Live) -> None:
        """Empties the slot of a turn's last snapshot, unless another request resumed from it."""
        if live.turn is None:
            return
        (slot, key), live.turn = live.turn, None
        if self._index.find(key) == slot and self._values.is_fresh(slot):
            self._drop(slot)

    def _forget(self, slot: int) -> bool:
        self._values.remove(slot)
        return self._index.discard(slot)

    def _drop(self, slot: int) -> None:
        """Empties the slot of a snapshot."""
        self._forget(slot)
        self._pool.reuse_next(slot)
