"""Owns what a fleet of devices is: figures of each device with their source, islands, and how a
fleet is written (`64xS5000@8`).

Refuses to know any model. A figure nobody published is null with a range, which widens predictions.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from math import sqrt

import msgspec

from firstlight.errors import BadInput, UsageError

# The vendor of a device that is the processors of a machine.
HOST_VENDOR = "host"
_FLEET = re.compile(r"^\s*(?:(\d+)\s*x\s*)?([A-Za-z0-9_.+-]+?)(?:\s*@\s*(\d+))?\s*$")


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number and where it was read. `value` None: not published; `low` and `high` bound it."""

    value: float | None
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def expected(self) -> float:
        """The value, else the geometric middle of the range."""
        if self.value is not None:
            return self.value
        return sqrt((self.low or 0.0) * (self.high or 0.0))

    @property
    def pessimistic(self) -> float:
        """The least it may be."""
        return self.expected if self.low is None else self.low

    @property
    def optimistic(self) -> float:
        """The most it may be."""
        return self.expected if self.high is None else self.high


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one accelerator has. Bytes, bytes a second (one direction for links) and dense FLOP a
    second.

    `island` counts the cards that reach one another over `link_bandwidth`; beyond it each has
    `network_bandwidth`. `machine` counts those of one host. Rates that a device lacks are None;
    `low_bit_rate` is that of its narrowest floating-point type below 8 bits.
    """

    name: str
    vendor: str
    island: int
    machine: int
    memory: Figure
    memory_bandwidth: Figure
    bf16_rate: Figure
    fp8_rate: Figure | None = None
    low_bit_rate: Figure | None = None
    link_bandwidth: Figure
    network_bandwidth: Figure
    host_bandwidth: Figure
    notes: str = ""

    @property
    def unpublished(self) -> tuple[str, ...]:
        """Names of figures that are ranges."""
        found = []
        for name in self.__struct_fields__:
            figure = getattr(self, name)
            if isinstance(figure, Figure) and figure.value is None:
                found.append(name)
        return tuple(found)


class Fleet(msgspec.Struct, frozen=True):
    """A number of equal devices in islands of `island`."""

    count: int
    device: Device
    island: int

    @property
    def machine(self) -> int:
        """Cards of one host; an island that was said to be smaller than usual is a host."""
        usual = self.device.machine
        if 1 < self.island < self.device.island:
            usual = min(usual, self.island)
        return min(usual, self.count)

    @property
    def text(self) -> str:
        """The fleet as it is written on a command line."""
        return f"{self.count}x{self.device.name}@{self.island}"


@cache
def catalogue() -> tuple[Device, ...]:
    """Returns every device known by figures, read from the data beside this file."""
    text = files("firstlight.planning").joinpath("hardware.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=list[Device]))


def find_device(name: str) -> Device:
    """Returns the device of that name, in any case. Raises UsageError listing the known ones."""
    for device in catalogue():
        if device.name.lower() == name.lower():
            return device
    known = ", ".join(device.name for device in catalogue())
    raise UsageError(f"no figures for a device named {name!r}; known: {known}, cpu")


def parse_fleet(text: str, host: Device | None = None) -> Fleet:
    """Reads `64xS5000@8`: how many, of which device, in islands of how many (its own when left
    out).

    `host` is what `cpu` stands for. Raises UsageError when the text is no fleet.
    """
    match = _FLEET.match(text)
    if match is None:
        raise UsageError(f"{text!r} is no fleet; write for example 64xS5000@8 or 8xB300")
    count, name, island = match.groups()
    device = host if host is not None and name.lower() == "cpu" else find_device(name)
    number, size = int(count or 1), int(island or device.island)
    if number < 1 or size < 1:
        raise UsageError(f"{text!r}: the number of devices and of an island must be at least 1")
    if size > device.island:
        raise UsageError(
            f"{text!r}: {device.name} is linked in islands of at most {device.island}, not {size}"
        )
    return Fleet(number, device, min(size, number))


def read_device(text: bytes) -> Device:
    """Returns a device from its JSON record. Raises BadInput saying which field is wrong."""
    try:
        return msgspec.json.decode(text, type=Device)
    except msgspec.DecodeError as error:
        raise BadInput(f"device profile: {error}") from error
