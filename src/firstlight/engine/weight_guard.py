"""Owns when the ranks' weights are compared with what was loaded, how much at a time, and what was
found. Knows no request; what damage means for those is decided elsewhere.

A round reads every weight once. The rounds of the timer are spread evenly over their period: each
turn of the loop reads what has become due, so that every step is longer by the same small share
instead of one by a whole round.
"""

import time
from collections.abc import Callable, Sequence

from firstlight.checkpoint.damage import Damage
from firstlight.engine.messages import RankWeightsChecked, WeightsReport
from firstlight.engine.ranks import RankGroup
from firstlight.metrics.events import Recorder, WeightsRead, WeightsRound
from firstlight.runner.protocol import AgreeOnWeights, CheckWeights, WeightsAgreed, WeightsChecked

# Least read in one turn, and the time a turn may take beside requests and without.
LEAST_BYTES = 4 * 2**20
BUSY_SECONDS = 0.02
IDLE_SECONDS = 0.2
# Told of the damage in one line; the report has all.
SHOWN = 3


class WeightGuard:
    """Checks of one engine's weights. `turn` is called between steps, as often as there are any.

    `period_seconds` 0 checks only when asked. `damages` are those found since the last reload.
    """

    def __init__(
        self,
        ranks: RankGroup,
        recorder: Recorder,
        *,
        period_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._recorder = recorder
        self._period = period_seconds
        self._clock = clock
        self._total = 0
        self._bytes_per_second = 0.0
        self._asked: list[str] = []
        self._found: list[Damage] = []
        self._round = 0
        self._begin()

    @property
    def damages(self) -> tuple[Damage, ...]:
        """What is damaged, as far as it was looked at."""
        return tuple(dict.fromkeys(self._found))

    @property
    def problem(self) -> str | None:
        """One line on the damage; None while there is none."""
        found = self.damages
        if not found:
            return None
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        lines = "; ".join(damage.line() for damage in found[:SHOWN])
        return f"weights in memory are no longer those that were loaded: {lines}{more}"

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for a round."""
        return bool(self._asked)

    def agree(self) -> list[WeightsAgreed]:
        """Lets ranks compare their weights with each other; checks begin from here."""
        self._ranks.send(AgreeOnWeights())
        return self.agreed(self._ranks.collect(WeightsAgreed))

    def agreed(self, reports: list[WeightsAgreed]) -> list[WeightsAgreed]:
        """Takes in that ranks have new weights, or found that those they have are not the same."""
        self._total = max(report.num_bytes for report in reports)
        self._found.clear()
        self._begin()
        return reports

    def ask(self, check_id: str) -> None:
        """Begins a round now, whose report `turn` returns under this name."""
        if not self._asked:
            self._begin()
        self._asked.append(check_id)

    def turn(self, *, busy: bool) -> list[WeightsReport]:
        """Reads what is due; returns the reports of rounds somebody waited for, if one ended."""
        num_bytes = self._due(busy)
        if not num_bytes:
            return []
        self._ranks.send(CheckWeights(self._round, num_bytes))
        self._take(self._ranks.collect(WeightsChecked))
        if not self._through:
            return []
        self._recorder.record(WeightsRound(seconds=self._clock() - self._began))
        reports = [self._report(check_id) for check_id in self._asked]
        self._asked.clear()
        return reports

    def _begin(self) -> None:
        self._round += 1
        self._began = self._clock()
        self._read: dict[int, int] = {}
        self._spent = 0.0
        self._through = False
        self._damaged: list[Damage] = []

    def _due(self, busy: bool) -> int:
        """Bytes of each rank to read now; 0 for none."""
        most = self._bytes_per_second * (BUSY_SECONDS if busy else IDLE_SECONDS)
        if self._asked:
            if self._through:
                self._begin()
            return max(LEAST_BYTES, int(most))
        if not self._period or self._found:
            return 0
        elapsed = self._clock() - self._began
        if self._through:
            if elapsed < self._period:
                return 0
            self._begin()
            elapsed = 0.0
        read = max(self._read.values(), default=0)
        due = int(self._total * min(1.0, elapsed / self._period)) - read
        if due < min(LEAST_BYTES, self._total - read):
            return 0
        return min(due, max(LEAST_BYTES, int(most)))

    def _take(self, checked: list[WeightsChecked]) -> None:
        seconds = max(one.seconds for one in checked)
        num_bytes = max(one.num_bytes for one in checked)
        if seconds and num_bytes >= min(LEAST_BYTES, self._total):
            self._bytes_per_second = num_bytes / seconds
        self._spent += seconds
        for one in checked:
            self._read[one.rank] = self._read.get(one.rank, 0) + one.num_bytes
            self._damaged += one.damages
            self._found += one.damages
        self._through = all(one.through for one in checked)
        damages = sum(len(one.damages) for one in checked)
        self._recorder.record(WeightsRead(num_bytes=num_bytes, seconds=seconds, damages=damages))

    def _report(self, check_id: str) -> WeightsReport:
        ranks = [
            RankWeightsChecked(
                rank, num_bytes, [damage for damage in self._damaged if damage.rank == rank]
            )
            for rank, num_bytes in sorted(self._read.items())
        ]
        return WeightsReport(check_id, ranks, self._spent)


def first_problem(reports: Sequence[WeightsAgreed]) -> str:
    """Why ranks have no common weights, "" when they have; what failed on a rank comes first."""
    return next((report.problem for report in reports if report.problem), "")
