"""The page `docs/benchmarks/deep-context.md`, made of the records that `deep_context.py` took.

Owns what has to be equal and within which budget; refuses to measure anything.

    python benchmarks/deep_context_page.py RECORDS
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from firstlight.units import format_bytes, format_seconds

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
DISK = "disk"
MOST_OVER = 1.05  # of the budgets of device and host together
COLUMNS = (
    "context", "attention", "side", "right", "nats a token", "read", "a question",
    "device", "host", "disk", "read from disk", "peak of the caches", "equal",
)  # fmt: skip

Record = Mapping[str, Any]


class Pair(NamedTuple):
    """Both sides at one length and attention; `resident` is None where it was left out."""

    tiered: Record
    resident: Record | None

    @property
    def differences(self) -> list[str]:
        """What is not the same on both sides."""
        if self.resident is None:
            return []
        ours, theirs = _said(self.tiered), _said(self.resident)
        return [name for name in ours if ours[name] != theirs.get(name)]

    @property
    def peak(self) -> int | None:
        """Bytes of caches in the tiered process at its peak: what it took beyond the resident one,
        whose caches are known. Bookkeeping and arithmetic are the same in both.
        """
        if self.resident is None:
            return None
        return _grown(self.tiered) - _grown(self.resident) + int(self.resident["cached"])


def _grown(record: Record) -> int:
    return int(record["peak"]["end"]) - int(record["peak"]["warm"])


def _said(record: Record) -> dict[str, Any]:
    read, answers = record["read"], record["answers"]
    said = {f"state of {name}": digest for name, digest in read["digests"].items()}
    for number, one in enumerate((read, *answers)):
        said[f"tokens {number}"], said[f"probabilities {number}"] = one["tokens"], one["logprobs"]
    return said


def pairs(records: Sequence[Record]) -> list[Pair]:
    """Puts the sides of each length and attention together, the shortest length first."""
    found: dict[tuple[int, str], dict[str, Record]] = {}
    for record in records:
        found.setdefault((record["length"], record["attention"]), {})[record["side"]] = record
    return [
        Pair(sides["tiered"], sides.get("resident"))
        for _, sides in sorted(found.items())
        if "tiered" in sides
    ]


def problems(pair: Pair) -> Iterator[str]:
    """Yields what is not as it must be."""
    record = pair.tiered
    name = f"{record['attention']} at {record['length']}"
    budget = record["device_bytes"] + record["host_bytes"]
    if pair.differences:
        yield f"{name}: differs from the resident side in {', '.join(pair.differences)}"
    if record["lost"]:
        yield f"{name}: {record['lost']} units were lost"
    if record["device"] > MOST_OVER * record["device_bytes"]:
        yield f"{name}: the device holds {format_bytes(record['device'])}"
    if record["host"] > MOST_OVER * record["host_bytes"]:
        yield f"{name}: the host tier holds {format_bytes(record['host'])}"
    if pair.peak is not None and pair.peak > MOST_OVER * budget:
        yield f"{name}: the caches took {format_bytes(pair.peak)} of {format_bytes(budget)}"
    needs_disk = record["cached"] > budget
    if needs_disk and not record["moved"].get("disk in"):
        yield f"{name}: nothing was read from disk"


def rows(pair: Pair) -> Iterator[tuple[str, ...]]:
    """Yields a line for each side."""
    for record in filter(None, (pair.resident, pair.tiered)):
        answers, is_tiered = record["answers"], record["side"] == "tiered"
        right = sum(one["right"] for one in answers)
        nats = sum(one["nats"] for one in answers) / len(answers)
        each = sorted(one["seconds"] for one in answers)[len(answers) // 2]
        peak = pair.peak if is_tiered else None
        yield (
            f"{record['length']:,}",
            record["attention"],
            record["side"],
            f"{right} of {len(answers)}",
            f"{nats:.4f}",
            format_seconds(record["read"]["seconds"]),
            format_seconds(each),
            format_bytes(record["device"] if is_tiered else record["cached"]),
            format_bytes(record["host"]) if is_tiered else "",
            format_bytes(_on_disk(record)) if is_tiered else "",
            format_bytes(record["moved"].get("disk in", 0)) if is_tiered else "",
            format_bytes(peak) if peak is not None else "",
            "" if not is_tiered or pair.resident is None else "no" if pair.differences else "yes",
        )


def _on_disk(record: Record) -> int:
    """Bytes of pages that lay on disk at the end."""
    pages = sum(
        place["cached"] + place["held"]
        for group in record["places"]
        for place in group
        if place["place"] == DISK
    )
    tokens = pages * int(record["page"])
    return tokens * int(record["cached"]) // int(record["listed"])


def page(found: Sequence[Pair], text: str) -> str:
    """Puts the table into the page, between its markers."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    lines += ["| " + " | ".join(row) + " |" for pair in found for row in rows(pair)]
    head, _, rest = text.partition("<!-- table -->\n")
    _, _, tail = rest.partition("<!-- end of table -->\n")
    table = "\n".join(lines)
    return f"{head}<!-- table -->\n{table}\n<!-- end of table -->\n{tail}"


def main() -> int:
    """Writes page and figures; 1 when something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--docs", type=Path, default=DOCS)
    given = parser.parse_args()
    files = sorted(given.records.glob("*.json"))
    found = pairs([json.loads(path.read_text(encoding="utf-8")) for path in files])
    wrong = [line for pair in found for line in problems(pair)]
    text = (given.docs / "deep-context.md").read_text(encoding="utf-8")
    (given.docs / "deep-context.md").write_text(page(found, text), encoding="utf-8")
    figures = [record for pair in found for record in (pair.resident, pair.tiered) if record]
    (given.docs / "deep-context.json").write_text(
        json.dumps(figures, indent=1) + "\n", encoding="utf-8"
    )
    print("\n".join(wrong) or f"{len(found)} comparisons hold", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
