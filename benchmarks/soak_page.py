"""Owns the page of a soak. Knows numbers and no service."""

from __future__ import annotations

from typing import NamedTuple

from soak_books import MEBI, Reading, bytes_of, outcomes, total
from soak_clients import Ledger


class Outcome(NamedTuple):
    """What became of one service: readings before, a third through, after, and when emptied; gaps
    of log-probability where greedy answers parted, and how many drawn ones did."""

    name: str
    flags: tuple[str, ...]
    seconds: float
    ledger: Ledger
    readings: tuple[Reading, Reading, Reading, Reading]
    gaps: list[float]
    num_drawn_apart: int
    problems: list[str]


INTRO = """\
Two real services of the bundled k3-mini, asked at the same time over HTTP: one rank with float32
caches, and two ranks with INT8 caches and block-sparse attention. Device, host tier and disk tier
of each hold a few thousand tokens, for at most 8 sequences at once; 8 clients each draw from 144
questions (shared prefixes, conversations, prompts longer than the device, three choices, answers
held to a schema or a call, prompt log-probabilities, pictures, the bundled questions whose
answers are known) and from 16 bad requests. Streams or not, priorities, salts and cache keys are
drawn anew each time; a fifth of the clients leave by closing the connection.

What is compared: every answer with the first one to the same question, token by token, of those
who left as far as they came. Greedy answers may part only at two tokens that are as likely as
each other (1e-3 apart in log-probability with float32 caches, 0.05 with INT8 ones), which is
asked of the service anew. Drawn answers follow a seed and are counted where they part.

What must hold in the end: nothing asked or held; completions that came are completions that
ended, none with an error; bytes of every group and tier as many as at the start; books of blocks,
slots, rows and counters recounted by the engine itself; after `POST /weights/reload`, which
forgets all prefixes, not a byte in use, held or cached in any tier; connections, files and
threads as before, resident memory within 48 MiB of what it was after a third of the time; exit
code 0, no process and no file left, no traceback in a log. The clock counts no time in which the
machine stood still.
"""
COUNTERS = {
    "preemptions": ("preemptions_total",),
    "of them swapped": ("swaps_total",),
    "requests whose state was fetched": ("tier_fetches_total",),
    "fetches later than a step": ("prefetch_misses_total",),
    "MiB read from host memory": ("tier_moved_bytes_total", 'place="host"', 'direction="in"'),
    "MiB read from disk": ("tier_moved_bytes_total", 'place="disk"', 'direction="in"'),
    "MiB written to disk": ("tier_moved_bytes_total", 'place="disk"', 'direction="out"'),
    "pages and slots lost": ("tier_lost_total",),
    "snapshots resumed from": ("snapshot_hits_total",),
    "snapshots given up": ("snapshot_evictions_total",),
    "prompt tokens found": ("prefix_hit_tokens_total",),
    "prompt tokens looked up": ("prefix_lookup_tokens_total",),
    "steps": ("steps_total",),
    "times books were recounted": ("books_checked_total",),
    "times weights were compared": ("weights_checks_total",),
}


def render(found: list[Outcome], command: str) -> str:
    """Writes the page."""
    parts = [f"# Soak\n\n`{command}`\n\n{INTRO}"]
    parts += [_side(one) for one in found]
    return "\n".join(parts)


def _side(one: Outcome) -> str:
    before, warm, after, _ = one.readings
    ledger, metrics = one.ledger, after.metrics
    lines = [f"## {one.name}", "", f"`{' '.join(one.flags)}`, {one.seconds:.0f} seconds", ""]
    lines += _table("asked", "times", sorted(ledger.asked.items()))
    lines += _table("heard by clients", "times", sorted(ledger.ended.items()))
    lines += _table("counted by the service", "completions", sorted(outcomes(metrics).items()))
    lines += _table("in the service", "number", _counters(metrics))
    gap = max(one.gaps, default=0.0)
    compared = [(f"compared, {name}", count) for name, count in sorted(ledger.compared.items())]
    compared.append(("greedy answers that part", len(one.gaps)))
    compared.append((f"log-probabilities of the two tokens there, at most {gap:.2g} apart", ""))
    compared.append(("drawn answers that part", one.num_drawn_apart))
    compared.append(("tokens heard", ledger.tokens))
    lines += _table("answers to the same question", "number", compared)
    uses = [
        (use, *(f"{bytes_of(reading.metrics, use):,}" for reading in one.readings))
        for use in ("used", "held", "cached", "empty")
    ]
    heads = ("start", "a third through", "idle at the end", "emptied")
    lines += _wide(("bytes of a rank, all tiers", *heads), uses)
    rows = []
    for first, then, now in zip(before.processes, warm.processes, after.processes, strict=True):
        each = (first, then, now)
        rows.append(
            (
                first.name,
                " / ".join(f"{p.resident / MEBI:.0f}" for p in each),
                " / ".join(str(p.descriptors) for p in each),
                " / ".join(str(p.threads) for p in each),
                " / ".join(str(p.sockets) for p in each),
            )
        )
    heads = ("MiB resident", "files", "threads", "connections")
    lines += _wide(("process: start / a third through / end", *heads), rows)
    verdict = [f"* {problem}" for problem in one.problems[:40]] or ["Nothing was wrong."]
    return "\n".join([*lines, *verdict, ""])


def _counters(metrics: object) -> list[tuple[str, str]]:
    assert isinstance(metrics, dict)
    found = []
    for name, (metric, *words) in COUNTERS.items():
        value = total(metrics, metric, *words)
        found.append((name, f"{value / MEBI:.1f}" if "MiB" in name else f"{value:,.0f}"))
    return found


def _table(first: str, second: str, rows: list[tuple[str, object]]) -> list[str]:
    return _wide((first, second), rows)


def _wide(heads: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [*lines, ""]
