"""Owns how the facts of a machine are put together from what its sources say; judges none.

Every method raises FactUnknown when the sources do not tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.platforms.compatibility import Compatibility, read_compatibility
from firstlight.platforms.machine import FactUnknown, Machine
from firstlight.platforms.stack import VendorStack
from firstlight.platforms.versions import local_part

_PCI = "/sys/bus/pci/devices"
_ACCELERATORS = ("0x03", "0x12")  # display controllers, processing accelerators


@dataclass(frozen=True)
class Card:
    """One card as its driver tells of it. `arch` 0: not known. Bytes."""

    index: int
    name: str
    pci: str
    arch: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Facts:
    """A machine, seen as one that should run a vendor's stack."""

    machine: Machine
    stack: VendorStack

    @property
    def known(self) -> Compatibility:
        """What is published of the vendor's stack."""
        return read_compatibility(self.stack.name)

    def host(self) -> Mapping[str, Any]:
        """System, processor type, kernel, Python, C library, groups and limits."""
        return self.machine.ask("host")

    def torch(self) -> Mapping[str, Any]:
        """What torch says after it loaded the vendor's plug-in; `error` when it did not."""
        return self.machine.ask(f"torch {self.stack.name}")

    def told_cards(self) -> Mapping[str, Any]:
        """Driver, cards and links as the management library tells them."""
        return self.machine.ask(f"cards {self.stack.name}")

    def cards(self) -> list[Card]:
        """Every card, from the management library or else from torch."""
        try:
            told = list(self.told_cards()["cards"])
        except FactUnknown:
            told = list(self.torch().get("devices", []))
            if not told:
                raise
        return [
            Card(
                index=index,
                name=str(one["name"]),
                pci=str(one.get("pci", "")),
                arch=int(one.get("arch") or self._arch_by_name(str(one["name"]))),
                total_bytes=int(one["total"]),
                free_bytes=int(one["free"]),
            )
            for index, one in enumerate(told)
        ]

    def driver(self) -> str:
        """The driver's version, from the management library or the vendor's command."""
        try:
            return str(self.told_cards()["driver"])
        except FactUnknown as first:
            printed = self._printed(self.stack.driver_command, self.stack.driver_pattern)
            if printed is None:
                raise FactUnknown(
                    f"{first}; {' '.join(self.stack.driver_command)} gave none"
                ) from first
            return printed

    def sdk(self) -> str:
        """The vendor's toolkit version: what torch was built for, else what the command prints."""
        build = _or_none(lambda: self.torch().get("build"))
        plugin = _or_none(lambda: self.torch().get("plugin")) or ""
        local = local_part(plugin, self.stack.name)
        printed = self._printed(self.stack.sdk_command, self.stack.sdk_pattern)
        found = printed or local or build
        if not found:
            raise FactUnknown("no source tells the toolkit's version")
        return str(found)

    def versions(self) -> dict[str, str | None]:
        """Every component's version, empty where it is known not to be there, None where nothing
        tells it.
        """
        host = _or_none(self.host) or {}
        torch = _or_none(self.torch) or {}
        return {
            "kernel": host.get("kernel"),
            "python": host.get("python"),
            "driver": _or_none(self.driver) if self.stack.driver_command else None,
            "sdk": _or_none(self.sdk),
            "torch": torch.get("version"),
            "plugin": torch.get("plugin"),
            "mooncake": _or_none(lambda: self._mooncake() or ""),
        }

    def arch(self) -> int:
        """The architecture all cards share, 0 when they differ or it is not known."""
        found = {card.arch for card in _or_none(self.cards) or ()}
        return found.pop() if len(found) == 1 else 0

    def _mooncake(self) -> str | None:
        return self.machine.distribution(f"mooncake-transfer-engine-{self.stack.name}")

    def _printed(self, command: tuple[str, ...], pattern: str) -> str | None:
        if not command:
            return None
        printed = _or_none(lambda: self.machine.command(*command))
        match = re.search(pattern, printed or "", re.MULTILINE | re.DOTALL)
        return match.group(1) if match else None

    def _arch_by_name(self, name: str) -> int:
        words = re.split(r"[^A-Za-z0-9]+", name.upper())
        fitting = (a.arch for a in self.known.architectures for c in a.cards if c.upper() in words)
        return next(fitting, 0)


def _or_none(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except FactUnknown:
        return None


def vendors_present(machine: Machine) -> set[str]:
    """Returns the PCI vendor numbers of the accelerators the kernel sees.

    Raises FactUnknown when it cannot be told.
    """
    found = set()
    for name in machine.names(_PCI) or ():
        kind = machine.text(f"{_PCI}/{name}/class") or ""
        if kind.startswith(_ACCELERATORS):
            found.add((machine.text(f"{_PCI}/{name}/vendor") or "").strip())
    return found
