"""Owns what a soak reads of a service from outside, and what must hold of it when all is over.

Knows metrics, processes and files; nothing of what was asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from live_service import LiveService

GAUGES = ("running_requests", "waiting_requests", "requests_in_flight")
MEBI = 1024 * 1024
# Beside what caches and tiers may take: what Python and the allocator keep of a larger moment.
MOST_GROWTH = 48 * MEBI
# Pools of threads start one at a time, when all they have are at work.
MORE_THREADS = 8


class Process(NamedTuple):
    """What one process of a service holds."""

    name: str
    process_id: int
    resident: int
    descriptors: int
    threads: int
    sockets: int


class Reading(NamedTuple):
    """A service at one moment: its metrics, its processes, and the files of its disk tier."""

    metrics: Mapping[str, float]
    processes: tuple[Process, ...]
    files: Mapping[str, int]


def read(service: LiveService, folder: Path) -> Reading:
    """Reads a service whose disk tier lies in a folder."""
    files = {path.name: path.stat().st_blocks * 512 for path in sorted(folder.glob("*"))}
    return Reading(service.metrics(), _processes(service), files)


def _processes(service: LiveService) -> tuple[Process, ...]:
    found, ranks = [], [process.pid for process in service.ranks()]
    for process in service.family():
        name = "api"
        if process.pid in ranks:
            name = f"rank {ranks.index(process.pid)}"
        elif process.pid == service.engine().pid:
            name = "engine"
        established = [
            one for one in process.net_connections("inet") if one.status == psutil.CONN_ESTABLISHED
        ]
        with process.oneshot():
            memory, threads = process.memory_info().rss, process.num_threads()
        files = process.num_fds()
        found.append(Process(name, process.pid, memory, files, threads, len(established)))
    return tuple(found)


def is_idle(metrics: Mapping[str, float]) -> bool:
    """Whether nothing is asked, held or on its way."""
    used = sum(bytes_of(metrics, use) for use in ("used", "held"))
    return not any(metrics[name] for name in GAUGES) and used == 0


def bytes_of(metrics: Mapping[str, float], use: str) -> int:
    """Bytes of one rank in all groups and places in some use: used, held, cached or empty."""
    names = ("cache_group_bytes", "tier_bytes")
    return int(sum(v for k, v in metrics.items() if k.startswith(names) and f'use="{use}"' in k))


def total(metrics: Mapping[str, float], name: str, *words: str) -> float:
    """The sum of the samples of a metric that have all these words among their labels."""
    found = (
        value
        for key, value in metrics.items()
        if re.match(rf"{name}(\{{|$)", key) and all(word in key for word in words)
    )
    return sum(found)


def outcomes(metrics: Mapping[str, float]) -> dict[str, int]:
    """Completions by how they ended."""
    found = re.compile(r'requests_total\{outcome="(\w+)"\}')
    return {m[1]: int(v) for k, v in metrics.items() if (m := found.match(k))}


def check_conserved(before: Reading, after: Reading) -> list[str]:
    """What does not add up of an idle service, compared with itself when it had just started."""
    problems = []
    metrics = after.metrics
    ended, received = sum(outcomes(metrics).values()), metrics["requests_received_total"]
    if ended != received:
        problems.append(f"{received:.0f} completions came and {ended} ended")
    if outcomes(metrics).get("error"):
        problems.append(f"{outcomes(metrics)['error']} completions ended with an error")
    for name in ("cache_group_bytes", "tier_bytes"):
        whole, found = total(before.metrics, name), total(metrics, name)
        if whole != found:
            problems.append(f"{name}: {found:.0f} bytes in all, {whole:.0f} at the start")
    if not is_idle(metrics):
        problems.append("something is held though nothing is asked")
    if metrics.get("nan_rows_total"):
        problems.append(f"{metrics['nan_rows_total']:.0f} rows were not finite")
    if metrics.get("books_checked_total", 0) <= before.metrics.get("books_checked_total", 0):
        problems.append("the service has not recounted its books")
    return problems


def check_processes(before: Reading, warm: Reading, after: Reading) -> list[str]:
    """What processes and files keep that they had not: `before` anything was asked, `warm` after
    a part of the time, `after` all of it.
    """
    problems = []
    if [p.process_id for p in before.processes] != [p.process_id for p in after.processes]:
        problems.append("some process was replaced")
    if before.files != after.files:
        problems.append(f"files of the disk tier: {after.files}, were {before.files}")
    for first, then, now in zip(before.processes, warm.processes, after.processes, strict=True):
        if now.sockets > first.sockets:
            problems.append(f"{now.name}: {now.sockets} connections, {first.sockets} at the start")
        if now.descriptors > max(first.descriptors, then.descriptors):
            problems.append(f"{now.name}: {now.descriptors} files, {first.descriptors} at first")
        if now.threads > max(first.threads, then.threads) + MORE_THREADS:
            problems.append(f"{now.name}: {now.threads} threads, {then.threads} when warm")
        if now.resident > then.resident + MOST_GROWTH:
            grown = (now.resident - then.resident) / MEBI
            problems.append(f"{now.name}: {grown:.0f} MiB more than when it was warm")
    return problems


def check_emptied(after: Reading) -> list[str]:
    """What is not empty though everything was forgotten."""
    return [
        f"{bytes_of(after.metrics, use)} bytes are still {use}"
        for use in ("used", "held", "cached")
        if bytes_of(after.metrics, use)
    ]
