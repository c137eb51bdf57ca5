"""Owns the fit of a device's rates to requests that were timed on it.

Knows no service: an observation is a load with its first-token and per-token time. Four figures are
fitted, those that the time model of one machine has: what memory and arithmetic reach, the least
time of a kernel, and what the engine does between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import log

from firstlight.planning.arrangement import Arrangement
from firstlight.planning.cost import CostModel
from firstlight.planning.rates import Rates
from firstlight.planning.simulate import Served, simulate
from firstlight.planning.work import ModelWork
from firstlight.planning.workload import PlanRules, Workload

# Factors by which a figure is changed in turn; each round takes a finer one.
_FACTORS = (3.0, 1.7, 1.3, 1.1, 1.04, 1.015)
_PASSES = 6
# Shares of the memory's rate from which a search begins.
_STARTS = (0.25, 1.0, 4.0)
# Where the search for the engine's work for a sequence and for a request begins.
_SEQUENCE, _REQUEST = 5e-5, 2e-3


@dataclass(frozen=True)
class Observation:
    """A load and what was measured of it: seconds to the first token, and for each further one."""

    load: Workload
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Machine:
    """A model as a machine serves it: its work, degrees and settings."""

    work: ModelWork
    arrangement: Arrangement
    rules: PlanRules

    def speed(self, rates: Rates, load: Workload) -> Served:
        """The prediction for a load."""
        size = self.rules.cache_element_bytes or self.work.table.element_bytes
        model = CostModel(self.work, self.arrangement, rates, size, self.rules.kv_dtype)
        return simulate(model, self.arrangement.sequences_each(load.concurrency), load, self.rules)


def fit(machine: Machine, start: Rates, observations: Sequence[Observation]) -> Rates:
    """Returns rates under which the times of all observations are nearest, by squared logarithms.

    Looks for a better value of one figure after the other in ever smaller steps, from several
    places, for a search of that kind may end in a hollow. Rates of a device whose figures were
    measured stay figures of that device: operations reach all of them.
    """
    known = replace(
        start.constants,
        **{"memory": 1.0, "matrix": 1.0, "overlap": 0.0, "imbalance": 1.0},
        **{"sequence": _SEQUENCE, "request": _REQUEST},
    )
    given = replace(start, constants=known, measured=True)
    found = [_search(machine, _memory(given, share), observations) for share in _STARTS]
    return min(found, key=lambda one: one[1])[0]


def _search(
    machine: Machine, best: Rates, observations: Sequence[Observation]
) -> tuple[Rates, float]:
    """Returns the best rates near those given, and their error."""
    error = error_of(machine, best, observations)
    for factor in _FACTORS:
        for _ in range(_PASSES):
            before = error
            for tried in _neighbours(best, factor):
                found = error_of(machine, tried, observations)
                if found < error:
                    best, error = tried, found
            if error == before:
                break
    return best, error


def _neighbours(rates: Rates, factor: float) -> Iterator[Rates]:
    """Yields rates with one figure changed, and with two, alike or one against the other: where
    both explain the same times, neither alone is seen to be wrong.
    """
    for change in (factor, 1 / factor):
        for vary in _FIGURES:
            yield vary(rates, change)
    for raised, other in permutations(_FIGURES, 2):
        yield raised(other(rates, 1 / factor), factor)
        yield raised(other(rates, factor), factor)


def error_of(machine: Machine, rates: Rates, observations: Sequence[Observation]) -> float:
    """Returns the sum of squared logarithms of predicted over measured times."""
    total = 0.0
    for one in observations:
        found = machine.speed(rates, one.load)
        total += log(found.ttft / one.ttft) ** 2 + log(found.tpot / one.tpot) ** 2
    return total


def _memory(rates: Rates, factor: float) -> Rates:
    return replace(rates, memory=rates.memory * factor)


def _matrix(rates: Rates, factor: float) -> Rates:
    return replace(rates, matrix=rates.matrix * factor, narrow=rates.narrow * factor)


def _kernel(rates: Rates, factor: float) -> Rates:
    known = rates.constants
    return replace(rates, constants=replace(known, kernel=known.kernel * factor))


def _host(rates: Rates, factor: float) -> Rates:
    known = rates.constants
    return replace(rates, constants=replace(known, host=known.host * factor))


def _sequence(rates: Rates, factor: float) -> Rates:
    known = rates.constants
    return replace(rates, constants=replace(known, sequence=known.sequence * factor))


def _request(rates: Rates, factor: float) -> Rates:
    known = rates.constants
    return replace(rates, constants=replace(known, request=known.request * factor))


_FIGURES = (_memory, _matrix, _kernel, _host, _sequence, _request)
