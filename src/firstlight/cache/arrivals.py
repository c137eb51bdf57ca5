"""Owns what is on its way from outside the device to units that requests hold; one cache group.

Knows no tensor and no policy. The source of a copy has a holder until the copy is there.
"""

from typing import NamedTuple

from firstlight.cache.far_pool import FarPool
from firstlight.cache.prefix_index import PrefixKey


class Arrival(NamedTuple):
    """The content of `unit` is to come to `target`, and to be found under `key` then, if any."""

    unit: int
    target: int
    key: PrefixKey | None


class Arrivals:
    """Copies that have not ended, by request."""

    def __init__(self, far: FarPool | None) -> None:
        self._far = far
        self._by_request: dict[str, list[Arrival]] = {}

    @property
    def requests(self) -> set[str]:
        """The requests for which something is on its way."""
        return set(self._by_request)

    def hold(self, unit: int) -> int:
        """Adds a holder to a unit that `add` is to name, and returns the unit."""
        assert self._far is not None, "there is no place outside the device"
        return self._far.hold(unit)

    def add(self, request_id: str, arrival: Arrival) -> None:
        """Notes a copy whose source has a holder of its own."""
        self._by_request.setdefault(request_id, []).append(arrival)

    def of(self, request_id: str) -> list[Arrival]:
        """What is on its way to a request."""
        return self._by_request.get(request_id, [])

    def finish(self, request_id: str) -> list[Arrival]:
        """Ends all copies of a request, and returns them."""
        arrivals = self._by_request.pop(request_id, [])
        for arrival in arrivals:
            assert self._far is not None, "there is no place outside the device"
            self._far.release(arrival.unit)
        return arrivals

    @property
    def units(self) -> list[int]:
        """The sources of all copies."""
        return [arrival.unit for arrivals in self._by_request.values() for arrival in arrivals]
