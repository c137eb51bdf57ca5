"""Owns what moving state costs against computing it anew, from what steps and moves really took.

Knows no request and no cache; takes no decision beyond the comparison of two durations.
"""

from collections.abc import Iterable, Mapping

from firstlight.schedule.step import TierFlow

# Weight of the newest measurement.
NEWEST = 0.2
# Bytes a second until something was measured: what slow memory and a slow disk do.
FIRST_RATES = {"host": 1e9, "disk": 1e8}
# Steps of fewer tokens say little about what a token of a prompt takes.
FEWEST_TOKENS = 16


class TierCosts:
    """Running means of seconds per computed token, and of bytes a second from and to each place."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, bool], float] = {}
        self.token_seconds: float | None = None

    def learn_step(self, num_tokens: int, seconds: float) -> None:
        """Takes in a step."""
        if num_tokens >= FEWEST_TOKENS:
            self.token_seconds = _mean(self.token_seconds, seconds / num_tokens)

    def learn_flows(self, flows: Iterable[TierFlow]) -> None:
        """Takes in what was moved."""
        for flow in flows:
            if flow.num_bytes and flow.seconds > 0:
                key = (flow.place, flow.inward)
                self._rates[key] = _mean(self._rates.get(key), flow.num_bytes / flow.seconds)

    def rate(self, place: str, *, inward: bool) -> float:
        """Bytes a second from (`inward`) or to a place."""
        return self._rates.get((place, inward), FIRST_RATES[place])

    def prefers_fetch(self, num_tokens: int, sizes: Mapping[str, int]) -> bool:
        """Whether bringing so many bytes from each place is quicker than computing the tokens.

        True while no step was measured.
        """
        if self.token_seconds is None:
            return True
        seconds = sum(size / self.rate(place, inward=True) for place, size in sizes.items())
        return seconds < num_tokens * self.token_seconds

    def prefers_swap(self, num_tokens: int, num_bytes: int, place: str) -> bool:
        """Whether moving so many bytes to a place and back is quicker than computing the tokens."""
        if self.token_seconds is None:
            return True
        rates = (self.rate(place, inward=inward) for inward in (False, True))
        return sum(num_bytes / rate for rate in rates) < num_tokens * self.token_seconds


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEWEST * (newest - before)
