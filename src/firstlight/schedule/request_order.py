"""Owns requests in the order in which they are to be served; knows not what they wait for."""

from bisect import bisect_left
from collections.abc import Iterator

from firstlight.schedule.request import Request


class RequestOrder:
    """Requests sorted by (priority, arrival), which no two share.

    Changing it costs one search and one move of pointers: 10,000 waiting requests are no burden.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request | None:
        """The request to be served before all others."""
        return self._requests[0] if self._requests else None

    @property
    def last(self) -> Request | None:
        """The request that all others precede."""
        return self._requests[-1] if self._requests else None

    def add(self, request: Request) -> None:
        """Puts a request where it belongs."""
        index = bisect_left(self._keys, request.precedence)
        self._keys.insert(index, request.precedence)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Takes out a request that is in it."""
        index = bisect_left(self._keys, request.precedence)
        assert self._requests[index] is request, f"{request.request_id} is not in this order"
        del self._keys[index], self._requests[index]

    def check_integrity(self) -> None:
        """Checks that order and requests agree."""
        keys = [request.precedence for request in self._requests]
        assert keys == self._keys == sorted(set(keys)), "requests stand out of order"


def split_running(running: RequestOrder) -> tuple[list[Request], list[Request]]:
    """Returns the requests one token behind, and the others in the order they are to advance."""
    answering: list[Request] = []
    prompts: list[Request] = []
    for request in running:
        one_behind = len(request.token_ids) - request.num_computed == 1
        (answering if one_behind else prompts).append(request)
    first = running.first
    prompts.sort(key=lambda r: (r is not first, r.submitted.priority, r.num_pending, r.arrival))
    return answering, prompts
