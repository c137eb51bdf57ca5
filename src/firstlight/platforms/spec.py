"""Owns the record of what one device is and has; knows nothing of how it was found out."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.units import format_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory: all of it, and what a new program can still take."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class DeviceSpec:
    """One device, resolved once. `kind` is the platform's name, `index` counts devices of it.

    `capabilities` are words code may ask for instead of a vendor: dtypes by name, `host_memory`
    when the device computes in the host's own memory, and those of `docs/guides/platform-plugins`.
    `undecided` are capabilities nobody could tell; `can` denies them. `arch` is the vendor's number
    of the architecture, 0 when it has none. `versions` are components and what was found, `quirks`
    names of workarounds that are on, `max_live_graphs` how many a process may hold, None for any.
    `cpu_features` are the processor's flags as the kernel names them; empty on other devices.
    `notes` say what limits the device and why.
    """

    name: str
    kind: str
    index: int
    memory: Memory
    cores: int
    capabilities: frozenset[str]
    cpu_features: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    vendor: str = ""
    arch: int = 0
    collective_backend: str = ""
    visible_variables: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    undecided: frozenset[str] = frozenset()
    quirks: frozenset[str] = frozenset()
    max_live_graphs: int | None = None

    def can(self, capability: str) -> bool:
        """Whether the device is known to have the capability."""
        return capability in self.capabilities

    def has_quirk(self, name: str) -> bool:
        """Whether the workaround of that name is on."""
        return name in self.quirks

    def __str__(self) -> str:
        parts = [
            f"{self.kind}:{self.index} {self.name}",
            f"arch {self.arch}" if self.arch else "",
            f"{format_bytes(self.memory.total_bytes)}",
            f"collectives {self.collective_backend}" if self.collective_backend else "",
            " ".join(f"{name} {version}" for name, version in self.versions),
            "can " + " ".join(sorted(self.capabilities)),
            "undecided " + " ".join(sorted(self.undecided)) if self.undecided else "",
            "quirks " + " ".join(sorted(self.quirks)) if self.quirks else "",
            f"at most {self.max_live_graphs} graphs" if self.max_live_graphs else "",
        ]
        return "; ".join(part for part in parts if part)
