"""Owns the page that shows a serving benchmark; knows nothing of how its numbers were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

OURS = "firstlight"
MEBIBYTE = 2**20


def render(data: dict[str, Any]) -> str:
    """Writes the whole page in Markdown."""
    parts = [_head(data), _questions(data), _memory(data), _ratios(data), _agreement(data)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(data: dict[str, Any]) -> str:
    machine = data["machine"]
    return "\n".join(
        [
            f"# Serving {data['model']} in fp32, {machine['threads']} threads",
            "",
            "Made by `python benchmarks/serving.py --write`. All sides answer the same token ids "
            "(real text, distinct for each request) in turns in one run; the end token is "
            f"ignored. Medians of {data['repeats']} repeats, smallest and largest in brackets.",
            "",
            f"- CPU: {machine['cpu']}, {machine['cpus_usable']} usable; L3 {machine['l3_cache']}; "
            f"{', '.join(machine['flags'])}",
            f"- memory {machine['memory_gib']} GiB, kernel {machine['kernel']}, Python "
            f"{machine['python']}, torch {machine['torch']}",
            f"- measured limits: fp32 GEMM {machine['gemm_flops'] / 1e9:.0f} GFLOP/s, memory reads "
            f"{machine['read_bytes'] / 1e9:.1f} GB/s",
            f"- load average before {machine['load_average']}, after "
            f"{machine['load_average_after']}: above the sides' own threads means that others "
            "worked on this machine too"
            + ("; idle threads of all sides sleep" if machine["passive_waiting"] else ""),
        ]
    )


def _questions(data: dict[str, Any]) -> str:
    names = list(data["sides"])
    rows = [
        ["(a) one stream, 128 in / 64 out, s", *_walls(data, "one stream")],
        ["(b) 32 at once, 128 in / 64 out, s", *_walls(data, "32 at once")],
        ["(b) the same, output tokens/s", *_rates(data, "32 at once", 32 * 64)],
        ["(c) decode steps alone, tokens/s", *_decode(data)],
        ["(d) 32 at once over own one stream, tokens/s", *_scaling(data)],
        ["(e) prefill of 4,000 tokens, s", *_walls(data, "long prefill")],
        ["(f) start to ready, s", *(f"{s['ready_seconds']:.1f}" for s in data["sides"].values())],
    ]
    rows[3].append("")
    header = ["question", *names, "least time the hardware needs (share reached)"]
    limits = data["limits"]
    for index, key in ((0, "one stream"), (1, "32 at once"), (5, "long prefill")):
        shares = (limits[key] / statistics.median(s["walls"][key]) for s in data["sides"].values())
        rows[index].append(f"{limits[key]:.3f} s ({', '.join(f'{v:.0%}' for v in shares)})")
    limit = data["limit_decode_tokens_per_second"]
    shares = (_median(s["decode_tokens_per_second"]) / limit for s in data["sides"].values())
    rows[3][-1] = f"{limit:.0f} tokens/s ({', '.join(f'{v:.0%}' for v in shares)})"
    return _table(header, [row + [""] * (len(header) - len(row)) for row in rows])


def _walls(data: dict[str, Any], key: str) -> list[str]:
    return [_spread(side["walls"][key], 3) for side in data["sides"].values()]


def _rates(data: dict[str, Any], key: str, num_tokens: int) -> list[str]:
    sides = data["sides"].values()
    return [_spread([num_tokens / wall for wall in side["walls"][key]], 1) for side in sides]


def _decode(data: dict[str, Any]) -> list[str]:
    return [_spread(side["decode_tokens_per_second"], 1) for side in data["sides"].values()]


def _scaling(data: dict[str, Any]) -> list[str]:
    found = []
    for side in data["sides"].values():
        pairs = zip(side["walls"]["one stream"], side["walls"]["32 at once"], strict=True)
        found.append(_spread([32 * one / many for one, many in pairs], 2))
    return found


def _memory(data: dict[str, Any]) -> str:
    rows = []
    for name, side in data["sides"].items():
        memory, planned = side["memory"], data["weight_bytes"] + side["planned_kv_bytes"]
        over = (memory["pss"] - planned) / MEBIBYTE
        counts = (memory["processes"], memory["pss"], memory["rss"], planned)
        cells = [str(counts[0]), *(f"{value / MEBIBYTE:.0f}" for value in counts[1:])]
        rows.append([name, *cells, f"{over:.0f}"])
    header = [
        "(g) memory at ready, MiB",
        "processes",
        "PSS",
        "RSS",
        "weights + KV",
        "PSS over them",
    ]
    return _table(header, rows)


def _ratios(data: dict[str, Any]) -> str:
    rows = [
        [name, key, f"{one['median']:.2f}", f"{one['min']:.2f}", f"{one['max']:.2f}"]
        for name, keys in data["ratios"].items()
        for key, one in keys.items()
    ]
    if not rows:
        return ""
    title = f"{OURS} is so many times as fast as its peer, repeat by repeat:\n\n"
    return title + _table(["peer", "question", "median", "least", "most"], rows)


def _agreement(data: dict[str, Any]) -> str:
    names = list(data["sides"])
    if len(names) < 2:
        return ""
    first = data["sides"][names[0]]["answers"]
    lines = []
    for name in names[1:]:
        other = data["sides"][name]["answers"]
        same = sum(a == b for a, b in zip(first, other, strict=True))
        lines.append(
            f"{names[0]} and {name} give the same 16 greedy tokens to {same} of {len(first)}"
        )
    return "Same work: " + "; ".join(lines) + " prompts."


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + " --- |" * len(header))
    return "\n".join(lines)
