"""Owns what Linux says of its processors and memory, limits of the control group included.

Reads files below a root, so that recorded machines can be read too; knows nothing of torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from firstlight.platforms.spec import Memory

# A control group without a limit reports a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Host:
    """A machine as far as this process may use it; `notes` name the limits that were found."""

    processor: str
    cores: int
    cpu_features: frozenset[str]
    memory: Memory
    notes: tuple[str, ...]


def read_host(root: Path = Path("/"), affinity: int | None = None) -> Host:
    """Reads the machine below `root`; `affinity` is the number of cores the scheduler allows."""
    allowed = len(os.sched_getaffinity(0)) if affinity is None else affinity
    groups = _control_groups(root)
    quota = min((found for group in groups if (found := _cpu_quota(group))), default=None)
    cores = allowed if quota is None else max(1, min(allowed, int(quota)))
    memory, limited = _memory(root, groups)
    notes = []
    if quota is not None and quota < allowed:
        notes.append(f"control group allows {quota:g} of {allowed} cores")
    if limited:
        notes.append(f"control group allows {memory.total_bytes} bytes of memory")
    processor, features = _processor(root)
    return Host(processor, cores, features, memory, tuple(notes))


def _processor(root: Path) -> tuple[str, frozenset[str]]:
    name, features = "", frozenset[str]()
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor") and not name:
            name = value.strip()
        if key.strip() in ("flags", "Features") and not features:
            features = frozenset(value.split())
    return name or "unknown processor", features


def _memory(root: Path, groups: tuple[Path, ...]) -> tuple[Memory, bool]:
    rows = (line.split() for line in _lines(root / "proc/meminfo"))
    table = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}
    total = table.get("MemTotal", 0)
    available = table.get("MemAvailable", table.get("MemFree", 0))
    limited = False
    for group in groups:
        limit = _first_number(group, "memory.max", "memory.limit_in_bytes")
        used = _first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= min(total or limit, _NO_LIMIT):
            continue
        # File pages that nobody uses count as used, and are given up when memory is asked for.
        free = max(0, limit - max(0, used - _inactive_file(group)))
        total, available, limited = limit, min(available, free), True
    return Memory(total, available), limited


def _control_groups(root: Path) -> tuple[Path, ...]:
    """The groups this process is in, for both versions, with their parents, nearest first."""
    base = root / "sys/fs/cgroup"
    found: dict[Path, None] = {}
    for line in _lines(root / "proc/self/cgroup") or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else [""]:
            group = base / controller / path.lstrip("/") if controller else base / path.lstrip("/")
            while group != base and base in group.parents:
                found[group] = None
                group = group.parent
    return (*found, base)


def _cpu_quota(group: Path) -> float | None:
    words = " ".join(_lines(group / "cpu.max")).split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota = _first_number(group, "cpu.cfs_quota_us")
    period = _first_number(group, "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _inactive_file(group: Path) -> int:
    rows = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    return int(rows.get("total_inactive_file") or rows.get("inactive_file") or 0)


def _first_number(group: Path, *names: str) -> int | None:
    for name in names:
        lines = _lines(group / name)
        if lines and lines[0].lstrip("-").isdigit():
            return int(lines[0])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
