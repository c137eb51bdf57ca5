"""Owns when state outside the device is fetched, left there, or computed anew instead.

Knows no step and no queue: the scheduler says who starts and who yields.
"""

from collections.abc import Iterable

from firstlight.cache.manager import CacheManager
from firstlight.schedule.incoming import Incoming
from firstlight.schedule.request import Request, RequestState
from firstlight.schedule.step import StepResult, TierReport
from firstlight.schedule.tally import Tally
from firstlight.schedule.tier_costs import TierCosts

# A request whose state was lost so often does without tiers, or fails if it is too long for that.
MOST_LOST = 4


class TierPolicy:
    """Decisions about tiers; with none of them every answer is that of the device alone."""

    def __init__(self, cache: CacheManager, tally: Tally) -> None:
        self._cache, self._tally = cache, tally
        self._costs = TierCosts()
        self.incoming = Incoming()

    def lookup(self, request: Request) -> int:
        """Tokens to be taken from the cache; from outside the device only if that is quicker."""
        near_only = request.shuns_tiers
        num_cached = self._cache.lookup(request, near=near_only)
        if near_only or not num_cached or not self._cache.tiers.exist:
            return num_cached
        far_bytes = self._cache.far_bytes(request, num_cached)
        if far_bytes:
            near = self._cache.lookup(request, near=True)
            if not self._costs.prefers_fetch(num_cached - near, far_bytes):
                return near
        return num_cached

    def stage(self, request: Request) -> bool:
        """Orders what lies outside the device of a request's computed tokens; False if nothing
        does.
        """
        if not self._cache.tiers.exist:
            return False
        most = self._cache.lookup(request)
        self._tally.recomputed_tokens += max(0, most - request.num_computed)
        moves = self._cache.stage(request)
        if moves:
            request.state = RequestState.ARRIVING
            self.incoming.add(request, moves)
            self._tally.fetches += 1
        return bool(moves)

    def recall(self, request: Request) -> None:
        """Gives up what is on its way to a request; it waits again."""
        self.incoming.remove(request)
        self._cache.release(request)
        request.num_computed = 0
        request.state = RequestState.WAITING

    def make_room(self, request: Request, num_tokens: int, *, others_wait: bool) -> None:
        """Has a request longer than the device move its oldest blocks out for its next tokens, and
        for others that wait.
        """
        if self._cache.outgrows_device(request):
            self._cache.spill(request, num_tokens, spares=others_wait)

    def park(self, request: Request) -> None:
        """Keeps a request that is about to be preempted whole, outside the device, if bringing it
        back is quicker than computing it anew.
        """
        if not self._cache.tiers.exist or request.num_computed > request.most_reused:
            return
        num_bytes, place = self._cache.held_bytes(request), self._cache.tiers.first_place
        if self._costs.prefers_swap(request.num_computed, num_bytes, place):
            self._tally.swaps += self._cache.park(request)

    def take(
        self, result: StepResult, num_tokens: int, running: Iterable[Request]
    ) -> list[Request]:
        """Takes in what ranks say of a step of so many tokens; returns the requests that wait
        again, because what they waited for is lost or does not come, and of the running ones those
        that read what is lost.
        """
        if not self._cache.tiers.exist:
            return []
        report = result.tiers or TierReport()
        self._costs.learn_step(num_tokens, result.seconds)
        self._costs.learn_flows(report.flows)
        back = self._lose({(one.group, one.unit) for one in report.lost}, running)
        arrived, num_late = self.incoming.note(report.pending)
        self._tally.late_fetches += num_late
        for request in arrived:
            self._cache.arrive(request)
        for request in self.incoming.overdue:
            request.shuns_tiers = True
            self.recall(request)
            back.append(request)
        return back

    def _lose(self, units: set[tuple[int, int]], running: Iterable[Request]) -> list[Request]:
        self._tally.lost_units += len(units)
        names = {name for unit in units for name in self._cache.tiers.lose(*unit)}
        back = [request for request in self.incoming.requests if request.request_id in names]
        for request in back:
            self.recall(request)
        back += [request for request in running if request.request_id in names]
        for request in back:
            request.num_lost += 1
            request.shuns_tiers |= request.num_lost >= MOST_LOST
        return back
