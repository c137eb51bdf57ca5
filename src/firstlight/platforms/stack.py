"""Owns the record of where a vendor's software shows on a machine, so that checks need no vendor.

Knows names of files, libraries, packages and variables; asks nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from firstlight.platforms.interface import DeviceRuntime

# Reads the vendor's management library; returns the record that docs/guides/platform-plugins shows.
ReadCards = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class VendorStack:
    """What a machine with a vendor's cards has, by name; empty where the vendor has no such thing.

    `pci_vendor` is the number in sysfs. `driver_command` prints the driver's version where
    `driver_pattern` matches. `libraries` are sonames the loader must find. `plugin` is the package
    that brings the device to torch, `build_attribute` the field of `torch.version` it sets.
    `backend_modules` may register the collectives; `foreign` are packages that take their names.
    `pythons` are the versions the vendor publishes for, empty: any that this program runs on.
    """

    name: str
    vendor: str
    pci_vendor: str = ""
    node_folder: str = ""
    node_prefix: str = ""
    node_group: str = ""
    kernel_module: str = ""
    peer_module: str = ""
    container_variable: str = ""
    visible_variables: tuple[str, ...] = ()
    driver_command: tuple[str, ...] = ()
    driver_pattern: str = ""
    sdk_command: tuple[str, ...] = ()
    sdk_pattern: str = ""
    libraries: tuple[str, ...] = ()
    management: str = ""
    plugin: str = ""
    build_attribute: str = ""
    collective_backend: str = "gloo"
    backend_modules: tuple[str, ...] = ("torch",)
    foreign: Mapping[str, str] = field(default_factory=dict)
    pythons: tuple[str, ...] = ()
    machines: tuple[str, ...] = ("x86_64",)
    link_name: str = ""
    read_cards: ReadCards | None = None


@dataclass(frozen=True)
class Platform:
    """What an entry point of the group `firstlight.platforms` gives: a runtime and its stack."""

    runtime: DeviceRuntime
    stack: VendorStack

    @property
    def name(self) -> str:
        """The platform's name, which is torch's device type."""
        return self.runtime.name
