"""Owns the requests whose state is on its way to the device, and the tickets of those copies.

Knows no block and no policy; the ranks say which tickets are not carried out yet.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from firstlight.cache.moves import UnitMove
from firstlight.schedule.request import Request
from firstlight.schedule.step import Fetch, UnitCopy

# A place that gives nothing for so long is not waited for: the tokens are computed instead.
OVERDUE_SECONDS = 20.0


@dataclass
class Delivery:
    """The copies for one request: their number, since when, and whether all ranks have them."""

    ticket: int
    since: float
    is_there: bool = False
    is_late: bool = False


class Incoming:
    """Requests that hold units and wait for their content. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deliveries: dict[Request, Delivery] = {}
        self._num_tickets = 0
        self._fetches: list[Fetch] = []
        self._recalled: list[int] = []

    def __len__(self) -> int:
        return len(self._deliveries)

    def __contains__(self, request: Request) -> bool:
        return request in self._deliveries

    @property
    def requests(self) -> list[Request]:
        """All of them, the one that waits longest first."""
        return list(self._deliveries)

    @property
    def arrived(self) -> list[Request]:
        """Those that can start."""
        return [request for request, one in self._deliveries.items() if one.is_there]

    @property
    def overdue(self) -> list[Request]:
        """Those that wait in vain."""
        latest = self._clock() - OVERDUE_SECONDS
        pairs = self._deliveries.items()
        return [request for request, one in pairs if not one.is_there and one.since < latest]

    def add(self, request: Request, moves: Sequence[UnitMove]) -> None:
        """Orders the copies for a request with the next plan."""
        self._num_tickets += 1
        self._deliveries[request] = Delivery(self._num_tickets, self._clock())
        self._fetches.append(Fetch(self._num_tickets, [UnitCopy(*move) for move in moves]))

    def remove(self, request: Request) -> None:
        """Takes out a request that starts; or that does not, then its copies are called back."""
        delivery = self._deliveries.pop(request)
        if not delivery.is_there:
            self._recalled.append(delivery.ticket)

    def note(self, pending: Iterable[int]) -> tuple[list[Request], int]:
        """Takes in which tickets some rank has not carried out. Returns the requests for which all
        has just arrived, and how many have now missed the first step they could have been in.
        """
        waiting, there, late = set(pending), [], 0
        for request, delivery in self._deliveries.items():
            if not delivery.is_there and delivery.ticket not in waiting:
                delivery.is_there = True
                there.append(request)
            elif not delivery.is_there and not delivery.is_late:
                delivery.is_late = True
                late += 1
        return there, late

    def take_orders(self) -> tuple[list[Fetch], list[int]]:
        """The copies to begin, and the tickets to drop, since the last call."""
        orders = self._fetches, self._recalled
        self._fetches, self._recalled = [], []
        return orders
