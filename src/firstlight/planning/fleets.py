"""Owns the question the other way round: which devices, and how few, keep a load and its targets.

Knows no prices: nothing published says what a device costs to you, so fewer devices come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstlight.planning.hardware import Device, Fleet, catalogue
from firstlight.planning.search import Answer, Question, search

LARGEST_FLEET = 128


@dataclass(frozen=True)
class FleetAnswer:
    """The smallest fleet of one device found, or the reason why none up to `limit` does."""

    device: Device
    answer: Answer
    limit: int

    @property
    def works(self) -> bool:
        """Whether the load fits and every target is kept."""
        return self.answer.memory is not None and not self.answer.misses

    @property
    def total_memory(self) -> float:
        """Bytes of memory of all devices used."""
        return self.answer.fleet.count * self.device.memory.expected


def find_fleets(
    question: Question, devices: Sequence[Device] | None = None, limit: int = LARGEST_FLEET
) -> tuple[FleetAnswer, ...]:
    """Returns the smallest fleet of each device, those that work first, then by number of devices
    and memory.

    `question.fleet` plays no role.
    """
    found = []
    for device in devices or catalogue():
        count = max(limit // device.island, 1) * device.island if device.island < limit else limit
        fleet = Fleet(count, device, min(device.island, count))
        asked = replace(question, fleet=fleet, objective="cheapest")
        found.append(FleetAnswer(device, search(asked), count))
    return tuple(sorted(found, key=lambda f: (not f.works, f.answer.fleet.count, f.total_memory)))
