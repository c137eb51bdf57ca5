"""Owns the sentences about a plan: what fits by how much, what is short, why another lost.

Every sentence carries its numbers; knows nothing of how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstlight.planning.cost import Spent
from firstlight.planning.memory import MemoryPlan, RankMemory
from firstlight.planning.predict import Forecast, Speed
from firstlight.planning.workload import Targets, Workload
from firstlight.units import format_bytes, format_seconds

_SPENT: Sequence[tuple[str, str]] = (
    ("weights", "matrices"),
    ("attention", "attention"),
    ("small_kernels", "small kernels"),
    ("collectives", "collectives"),
)


def short_count(number: int) -> str:
    """Writes a token count as users do: `128K`, `1M`, else the digits."""
    for step, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number and number % step == 0:
            return f"{number // step}{letter}"
    return str(number)


def load_text(workload: Workload) -> str:
    """Writes what memory is planned for: `128K x 16`."""
    return f"{short_count(workload.context)} x {workload.concurrency}"


def verdict(memory: MemoryPlan, workload: Workload) -> str:
    """Says whether an arrangement fits, with what is left or short and on which rank."""
    worst, text = memory.worst, memory.arrangement.text
    if memory.fits:
        fits = f"{text} fits with {format_bytes(worst.spare)} left at {load_text(workload)}"
        at_once = memory.places.at_once(workload.context)
        beside = f", {at_once} of {memory.sequences} at full length at once"
        return fits + (beside if at_once < memory.sequences else "")
    return f"{text} is {shortage(worst)} at {load_text(workload)}"


def shortage(rank: RankMemory) -> str:
    """Says how much a rank lacks and what takes its memory, the largest first."""
    largest = sorted(rank.components.items(), key=lambda item: -item[1])
    takers = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest[:3] if size)
    return (
        f"short by {format_bytes(-rank.spare)} on rank {rank.ranks.start}: {takers} of "
        f"{format_bytes(rank.device_bytes)}"
    )


def missed(forecast: Forecast | Speed, targets: Targets) -> str:
    """Says which target a plan misses, empty when it keeps all."""
    speed = forecast.expected if isinstance(forecast, Forecast) else forecast
    words = []
    for name, asked in (("ttft", targets.ttft), ("tpot", targets.tpot)):
        found = getattr(speed, name)
        if asked is not None and found > asked:
            words.append(f"{name.upper()} {milli(found)}, asked {milli(asked)}")
    return "; ".join(words)


def slower(speed: Speed, best: Speed, objective: str) -> str:
    """Says by how much a plan is behind the best, and where most of the time is lost."""
    if objective == "throughput":
        text = f"{speed.tokens_per_second:,.0f} tokens/s against {best.tokens_per_second:,.0f}"
    else:
        text = f"TPOT {milli(speed.tpot)} against {milli(best.tpot)}"
    return f"{text}: {_largest_loss(speed, best)}"


def _largest_loss(speed: Speed, best: Speed) -> str:
    losses = [(a - b, word) for a, b, word in _pairs(speed.decode, best.decode)]
    losses.append((speed.others - best.others, "the prompts of others"))
    lost, word = max(losses)
    if lost <= 0:
        return f"a first token after {milli(speed.ttft)} against {milli(best.ttft)}"
    return f"{milli(lost)} more in {word}"


def _pairs(one: Spent, other: Spent) -> list[tuple[float, float, str]]:
    return [(getattr(one, name), getattr(other, name), word) for name, word in _SPENT]


def milli(seconds: float) -> str:
    """Writes a time of a request, three digits below a second."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return format_seconds(seconds)
