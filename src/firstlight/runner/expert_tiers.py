"""Owns routed experts that do not all fit: slots on the device, host memory behind it, then files.

Knows which experts a step needs when it needs them; who stays is the heat's matter.

Shape letters: T tokens, L width experts work in, K experts chosen for a token, N experts of a layer
at hand, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.checkpoint.executor import Job
from firstlight.checkpoint.pieces import PieceKey
from firstlight.checkpoint.reading_threads import Reading
from firstlight.kernels.reference.wide import wide
from firstlight.runner.expert_heat import Heat, SlotTable
from firstlight.runner.piece_feed import PieceFeed

# Experts on their way from files to a device at once, in host memory made for that.
_STAGED = 16

_Keys = Collection[PieceKey]


@dataclass
class _Fetch:
    """Experts on their way; `left` are keys and slots that have to wait for staging memory."""

    reading: Reading | None = None
    arrived: Any = None
    left: Sequence[tuple[PieceKey, int]] = ()


class _Move:
    """What brings some experts into their slots: jobs, and copies that follow on the last."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.copies: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = []
        self.compared: list[tuple[PieceKey, Mapping[str, Tensor]]] = []


class ExpertTiers:
    """The experts of all layers in `num_slots` slots, with `num_host` more in host memory."""

    def __init__(
        self, keys: Sequence[PieceKey], feed: PieceFeed, *, device: torch.device, num_slots: int
    ) -> None:
        self._keys, self._feed, self._device = keys, feed, device
        self._heat = Heat()
        self._table: SlotTable[PieceKey] = SlotTable(num_slots, self._heat)
        self._host_table: SlotTable[PieceKey] = SlotTable(0, self._heat)
        self._host = torch.empty(0, 0)
        self._staging: list[Tensor] = []
        self._arrived: Any = None
        self._last_layer = -1
        self.stacks = {
            _leaf(name): torch.empty((num_slots, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in feed.image(keys[0]).kinds.items()
        }

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(stack.nbytes for stack in self.stacks.values())

    def read_all(self, host_bytes: int, advanced: Callable[[int, str], None]) -> None:
        """Reads every expert once, digests compared; the first ones stay in `host_bytes` of host
        memory. `advanced(bytes, what)` is told of each."""
        size = self._feed.image(self._keys[0]).num_bytes
        num_host = min(len(self._keys), host_bytes // size)
        self._host_table = SlotTable(num_host, self._heat)
        self._host = self._feed.lane.staging(num_host * size).view(num_host, size)
        for start in range(0, len(self._keys), self._table.num_slots):
            wave = self._keys[start : start + self._table.num_slots]
            self._land(self._fetch(wave, locked=wave))
            for key in wave:
                advanced(self._feed.pieces.pieces[key].num_bytes, str(key))
        self._feed.take_traffic()

    def rounds(self, layer: int, experts: Sequence[int]) -> Iterator[dict[int, int]]:
        """Yields slots by expert, in rounds of ascending numbers: each when its experts are there,
        while those of the next one are on their way. `experts` ascend."""
        if layer <= self._last_layer:
            self._heat.next_step()
        self._last_layer = layer
        keys = [PieceKey(layer, expert) for expert in experts]
        self._heat.use(keys)
        slots = self._table.num_slots
        size = slots if len(keys) <= slots else slots // 2
        runs = [keys[at : at + size] for at in range(0, len(keys), size)]
        fetch = self._needed(runs[0], locked=runs[0], wanted=keys)
        for number, run in enumerate(runs):
            self._land(fetch)
            if number + 1 < len(runs):
                following = runs[number + 1]
                later = {key for other in runs[number + 1 :] for key in other}
                fetch = self._needed(following, locked={*run, *following}, wanted=later)
            yield {key.expert: self._table.slot_of(key) for key in run}

    def _needed(self, run: Sequence[PieceKey], *, locked: _Keys, wanted: _Keys) -> _Fetch:
        misses = self._table.absent(run)
        traffic = self._feed.traffic
        traffic.expert_hits += len(run) - len(misses)
        traffic.expert_misses += len(misses)
        return self._fetch(run, locked=locked, wanted=wanted)

    def _fetch(self, run: Sequence[PieceKey], *, locked: _Keys, wanted: _Keys = ()) -> _Fetch:
        absent = self._table.absent(run)
        if not absent:
            return _Fetch()
        slots = self._table.place(absent, locked=set(locked), wanted=set(wanted))
        fetch = _Fetch(left=list(zip(absent, slots, strict=True)))
        self._send(fetch, set(run))
        return fetch

    def _land(self, fetch: _Fetch) -> None:
        """Returns when all experts of a fetch are there for what is computed from now on."""
        while fetch.reading is not None:
            self._feed.wait(fetch.reading)
            self._feed.lane.ready(fetch.arrived)
            fetch.reading = None
            if fetch.left:
                self._send(fetch, {key for key, _ in fetch.left})

    @torch.inference_mode(False)  # threads that compute nothing write to what is made here
    def _send(self, fetch: _Fetch, run: _Keys) -> None:
        """Starts what brings the experts that are left, as many as there is staging memory for."""
        if self._arrived is not None:
            self._arrived.synchronize()  # copies out of host memory that is now written anew
        most = len(fetch.left) if self._feed.lane.is_host else _STAGED
        passed, move = self._feed.lane.mark(), _Move()
        for number, (key, slot) in enumerate(fetch.left[:most]):
            tensors = {name: stack[slot] for name, stack in self.stacks.items()}
            self._plan(move, key, tensors, number=number, run=run)
        fetch.left = fetch.left[most:]

        def then() -> None:
            for key, tensors in move.compared:
                self._feed.pieces.compare(key, tensors)
            pairs = [(to[n], source[n]) for to, source in move.copies for n in to]
            if self._feed.lane.is_host:
                for target, source in pairs:
                    target.copy_(source)
            fetch.arrived = self._arrived = self._feed.lane.copy(pairs, after=passed)

        # Layers that are read ahead have time; this step waits for its experts.
        fetch.reading = self._feed.threads.start(move.jobs, then, is_urgent=True)

    def _plan(
        self,
        move: _Move,
        key: PieceKey,
        slot: Mapping[str, Tensor],
        *,
        number: int,
        run: _Keys,
    ) -> None:
        """Adds what brings one expert into its slot, and into host memory if it is let in there."""
        feed, image = self._feed, self._feed.image(key)
        at = self._host_table.slot_of(key)
        if at >= 0:
            move.copies.append((slot, _by_leaf(image.views(self._host[at]))))
            move.jobs.append(feed.present_job(key, image.num_bytes))
            return
        at = self._host_table.admit(key, locked=run)
        if at >= 0:
            host = image.views(self._host[at])
        elif feed.lane.is_host:
            host = {name: slot[_leaf(name)] for name in image.names}
        else:
            host = image.views(self._staging_of(number, image.num_bytes))
        if at >= 0 or not feed.lane.is_host:
            move.copies.append((slot, _by_leaf(host)))
        move.jobs += feed.read_jobs(key, host, check=True)
        move.compared.append((key, host))

    def _staging_of(self, number: int, num_bytes: int) -> Tensor:
        while len(self._staging) <= number:
            self._staging.append(self._feed.lane.staging(num_bytes))
        return self._staging[number]


class TieredExperts(nn.Module):
    """Stands where a layer's experts stood, and has those brought that its tokens chose."""

    def __init__(self, experts: nn.Module, layer: int, here: range, tiers: ExpertTiers) -> None:
        """`experts` computes: its parameters become the slots. `here` are the experts at hand."""
        super().__init__()
        for leaf, stack in tiers.stacks.items():
            assert leaf in experts._parameters, f"experts have no parameter {leaf}"
            experts._parameters[leaf] = nn.Parameter(stack, requires_grad=False)
        self.experts = experts
        experts.first = here.start  # type: ignore[assignment]
        self._layer, self._here, self._tiers = layer, here, tiers

    def forward(self, x_TL: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns this rank's part of each token's weighted sum, [T, L], as if all were here."""
        chosen = sorted(set(ids_TK.flatten().tolist()))  # host sync: what is to be brought
        needed = [expert for expert in chosen if expert in self._here]
        if not needed:
            return torch.zeros_like(x_TL)
        total_TL = torch.zeros_like(wide(x_TL))
        for slots in self._tiers.rounds(self._layer, needed):
            slots_N = torch.tensor([slots.get(expert, -1) for expert in self._here])
            total_TL = self.experts(x_TL, ids_TK, weights_TK, slots_N, total_TL)
        return total_TL.to(x_TL.dtype)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _by_leaf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_leaf(name): tensor for name, tensor in tensors.items()}
