"""Asks what half an hour of everything at once leaves behind in a service: nothing, if all is well.

Owns the order of events and the page. Two real services of k3-mini, one rank with fp32 caches and
two ranks with INT8 caches and block-sparse attention, each with a device, a host tier and a disk
tier that hold a few thousand tokens, are asked over HTTP by clients that come, compare and leave.

    python benchmarks/soak.py [--seconds 1800] [--clients 8] [--only one-rank] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

# isort: split
from soak_books import (
    Reading,
    bytes_of,
    check_conserved,
    check_emptied,
    check_processes,
    is_idle,
    read,
)
from soak_books import outcomes as outcomes_of
from soak_clients import Clients, Ledger
from soak_page import Outcome, render
from soak_requests import make_bad, make_questions

from firstlight.accept.convert import convert
from live_service import LiveService

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "soak.md"
MODEL = "k3-mini"
CONTEXT = 3072
QUESTIONS = 144
COMMON = (
    *("--served-model-name", MODEL, "--threads", "1", "--context", str(CONTEXT)),
    *("--max-sequences", "8", "--chunk-tokens", "128", "--max-batch-tokens", "192"),
    *("--max-waiting", "8", "--encoder-cache-bytes", "256KiB", "--weights-check-seconds", "120"),
)
# Longer than this between two ticks of the clock: the machine stood still, and so does the soak.
MOST_TICK = 2.0
START_SECONDS = 900.0
SECONDS_BETWEEN_LINES = 60.0
# A short run goes on for so many times its length until everything has happened once.
MOST_TIMES = 5
# An idle service recounts at most every ten seconds.
RECOUNT_SECONDS = 120.0


class Side(NamedTuple):
    """A service under test. Greedy answers may part where two tokens are as close as `spread`."""

    name: str
    flags: tuple[str, ...]
    tiers: str
    spread: float


SIDES = (
    Side("one-rank", ("--kv-budget-bytes", "1740KiB"), "host=1MiB,disk={}:2MiB", 1e-3),
    Side(
        "two-ranks-int8",
        (
            *("--tp", "2", "--kv-dtype", "int8", "--kv-budget-bytes", "640KiB"),
            *("--attention", "sparse=16x24"),
        ),
        "host=320KiB,disk={}:768KiB",
        0.05,
    ),
)


def main() -> int:
    """Runs the soak, prints its page and says by its exit code whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--only", choices=[side.name for side in SIDES])
    parser.add_argument("--store", type=Path, help="one of k3-mini; without it, one is made")
    parser.add_argument("--write", action="store_true", help=f"keep the page in {PAGE}")
    asked = parser.parse_args()
    sides = [side for side in SIDES if asked.only in (None, side.name)]
    with tempfile.TemporaryDirectory(prefix="firstlight-soak-") as name:
        folder, bundled = Path(name), resources.files("firstlight") / "data" / "k3_mini"
        if asked.store:
            (folder / "store").symlink_to(asked.store.resolve())
        else:
            convert(Path(str(bundled)), folder / "store")
        found = asyncio.run(soak_all(sides, folder, asked.seconds, asked.clients))
    page = render(found, " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]]))
    print(page)
    if asked.write:
        PAGE.write_text(page)
    return 1 if any(one.problems for one in found) else 0


async def soak_all(sides: list[Side], folder: Path, seconds: float, clients: int) -> list[Outcome]:
    """All services at once: they share the machine, as services do. One that fails harms no other;
    its failure is raised in the end.
    """
    runs = [Soak(side, folder, clients) for side in sides]
    try:
        found = await asyncio.gather(*(run.run(seconds) for run in runs), return_exceptions=True)
    finally:
        for run in runs:
            run.service.close()
    outcomes = [one for one in found if isinstance(one, Outcome)]
    for failure in found:
        if isinstance(failure, BaseException):
            print(render(outcomes, "of those that came to their end"), flush=True)
            raise failure
    return outcomes


class Soak:
    """One service from its start to its end."""

    def __init__(self, side: Side, folder: Path, num_clients: int) -> None:
        self.side, self._num_clients = side, num_clients
        self._tier = folder / f"tier-{side.name}"
        tiers = ("--tiers", side.tiers.format(self._tier))
        log = folder / f"{side.name}.log"
        self.service = LiveService(folder / "store", log, *COMMON, *side.flags, *tiers)
        self._ledger = Ledger()

    async def run(self, seconds: float) -> Outcome:
        """Asks for so many seconds, not counting those in which the machine stood still."""
        service, ledger = self.service, self._ledger
        await asyncio.to_thread(service.wait_ready, START_SECONDS)
        questions = make_questions(MODEL, CONTEXT, QUESTIONS)
        clients = Clients(service.url, questions, make_bad(MODEL, CONTEXT), ledger)
        before = await self._read()
        self._tell("ready")
        await self._control(clients)
        self._tell("asked what is known")
        stop = asyncio.Event()
        tasks = [
            asyncio.create_task(clients.run(number, stop)) for number in range(self._num_clients)
        ]
        warm = await self._pass_time(seconds, clients, tasks)
        stop.set()
        await asyncio.gather(*tasks)
        await self._control(clients)
        self._tell("asked again")
        apart = [await clients.how_close(one) for one in ledger.differ if not one.question.drawn]
        await clients.close()
        after = await self._settle(before)
        problems = check_conserved(before, after) + check_processes(before, warm, after)
        self._tell(f"idle, {problems}")
        emptied = await self._forget()
        problems += check_emptied(emptied)
        problems += await asyncio.to_thread(self._end)
        drawn = sum(one.question.drawn for one in ledger.differ)
        problems += [f"greedy answers part at {gap:.3g}" for gap in apart if gap > self.side.spread]
        problems += [f"{kind} was never so" for kind in self._missing(after)]
        return Outcome(
            self.side.name,
            self.side.flags,
            seconds,
            ledger,
            (before, warm, after, emptied),
            apart,
            drawn,
            problems + ledger.problems,
        )

    async def _read(self) -> Reading:
        return await asyncio.to_thread(read, self.service, self._tier)

    async def _control(self, clients: Clients) -> None:
        """Questions whose right answers are known, all at once."""
        known = [one for one in clients.questions if one.sample is not None]
        bodies = [{**one.fields, "stream": one.number % 2 == 0} for one in known]
        asked = (clients.send(*pair) for pair in zip(known[:8], bodies, strict=False))
        await asyncio.gather(*asked)

    async def _pass_time(
        self, seconds: float, clients: Clients, tasks: list[asyncio.Task[None]]
    ) -> Reading:
        """Waits, longer where something it is about has not come about yet; returns what the
        service holds after a third of the time. Stops early when a client has failed.
        """
        warm, passed, told, last = None, 0.0, 0.0, time.monotonic()
        while not await self._is_enough(passed, seconds) and not any(t.done() for t in tasks):
            await asyncio.sleep(0.5)
            now = time.monotonic()
            passed, last = passed + min(now - last, MOST_TICK), now
            if warm is None and passed > seconds / 3:
                warm = await self._read()
            if passed // SECONDS_BETWEEN_LINES > told:
                told = passed // SECONDS_BETWEEN_LINES
                self._tell(f"{passed:.0f} s, {dict(self._ledger.ended)}")
        return warm or await self._read()

    async def _is_enough(self, passed: float, seconds: float) -> bool:
        if passed < seconds:
            return False
        return passed > MOST_TIMES * seconds or not self._missing(await self._read())

    async def _settle(self, before: Reading) -> Reading:
        """Waits until nothing is asked or held, and books were recounted after that."""
        deadline = time.monotonic() + RECOUNT_SECONDS
        while True:
            found = await self._read()
            counted = found.metrics.get("books_checked_total", 0)
            if is_idle(found.metrics) and counted > before.metrics.get("books_checked_total", 0):
                return found
            if time.monotonic() > deadline:
                return found
            await asyncio.sleep(1)

    async def _forget(self) -> Reading:
        """Has the service read its weights again, which empties its caches."""

        def reload() -> None:
            with self.service.client(600.0) as client:
                answer = client.post("/weights/reload", json={})
                assert answer.status_code == 200, answer.text

        await asyncio.to_thread(reload)
        deadline = time.monotonic() + 10
        while True:  # metrics come with the next heartbeat
            found = await self._read()
            if not bytes_of(found.metrics, "cached") or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.5)

    def _tell(self, text: str) -> None:
        """A line for who watches."""
        found = len(self._ledger.problems)
        print(f"{self.side.name}: {text}, {found} problems", file=sys.stderr, flush=True)

    def _end(self) -> list[str]:
        problems = []
        if self.service.status("/health") != 200:
            problems.append(f"not healthy: {self.service.get('/health').text}")
        self.service.terminate()
        code = self.service.wait_exit(60)
        if code != 0:
            problems.append(f"it ended with {code}: {self.service.log[-500:]}")
        time.sleep(1)
        problems += [f"process {one.pid} is left" for one in self.service.survivors()]
        problems += [f"{path} is left" for path in self._tier.glob("*")]
        if "Traceback" in self.service.log:
            problems.append(f"a traceback in the log: {self.service.log[-2000:]}")
        return problems

    def _missing(self, after: Reading) -> list[str]:
        """What a soak is about and did not happen."""
        metrics, ended = after.metrics, self._ledger.ended
        happened = Counter(outcomes_of(metrics))
        happened["preempted"] = int(metrics.get("preemptions_total", 0))
        happened["swapped"] = int(metrics.get("swaps_total", 0))
        happened["fetched"] = int(metrics.get("tier_fetches_total", 0))
        happened["found"] = int(metrics.get("prefix_hit_tokens_total", 0))
        happened["snapshot found"] = int(metrics.get("snapshot_hits_total", 0))
        for place in ("host", "disk"):
            name = f'tier_moved_bytes_total{{place="{place}",direction="in"}}'
            other = f'tier_moved_bytes_total{{direction="in",place="{place}"}}'
            happened[f"read from {place}"] = int(metrics.get(name, metrics.get(other, 0)))
        wanted = (
            *("stop", "length", "cancelled", "preempted", "swapped", "fetched", "found"),
            *("snapshot found", "read from host", "read from disk"),
        )
        heard = ("answered", "client left", "refused")
        return [n for n in wanted if not happened[n]] + [n for n in heard if not ended[n]]


if __name__ == "__main__":
    sys.exit(main())
