"""Owns the memory ledger of a rank: what each pool was planned to hold and what it really holds."""

import resource
from dataclasses import dataclass
from pathlib import Path

from firstlight.platforms.host import read_host

PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class Pool:
    """One pool of memory: its budget and what is allocated, in bytes."""

    name: str
    budget: int
    allocated: int

    @property
    def error(self) -> float:
        """Relative difference of allocation and budget; 0 when both are empty."""
        return (self.allocated - self.budget) / self.budget if self.budget else 0.0


def resident_bytes() -> int:
    """Returns the resident memory of this process, from the kernel's own count."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * PAGE_BYTES


def peak_resident_bytes() -> int:
    """Returns the largest resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_bytes() -> int:
    """Returns the memory a process here may still take, the limits of a container included."""
    return read_host().memory.available_bytes
