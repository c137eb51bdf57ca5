"""Owns the record of what one device is and has; knows nothing of how it was found out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory: all of it, and what a new program can still take."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class DeviceSpec:
    """One device. `kind` is the platform's name, `index` counts devices of that kind.

    `capabilities` are words code may ask for instead of a vendor: dtypes by name, and `host_memory`
    when the device computes in the host's own memory. `cpu_features` are the processor's flags as
    the kernel names them; empty on other devices. `notes` say what limits the device and why.
    """

    name: str
    kind: str
    index: int
    memory: Memory
    cores: int
    capabilities: frozenset[str]
    cpu_features: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def can(self, capability: str) -> bool:
        """Whether the device has the capability."""
        return capability in self.capabilities
