"""Which device a rank gets, and its part of the memory."""

from dataclasses import dataclass

import pytest

from firstlight.platforms.find import find_platform
from firstlight.platforms.spec import Memory
from firstlight.runner.memory import RankDevice, first_device

GIB = 1024**3


@dataclass(frozen=True)
class Cards:
    """So many devices of 8 GiB, of which card n has n GiB taken."""

    number: int
    name: str = "cards"
    collective_backend: str = "gloo"

    def count(self) -> int:
        return self.number

    def memory(self, index: int = 0) -> Memory:
        return Memory(8 * GIB, (8 - index) * GIB)


@pytest.mark.parametrize(
    ("cards", "rank", "ranks", "index", "available"),
    [(1, 0, 1, 0, 8), (4, 3, 4, 3, 5), (2, 3, 4, 1, 3.5), (1, 1, 2, 0, 4), (2, 0, 3, 0, 4)],
)
def test_devices_are_dealt_out_and_shared_evenly(cards, rank, ranks, index, available):
    device = RankDevice(Cards(cards), rank, ranks)
    assert device.index == index and device.available_bytes() == int(available * GIB)


def test_what_is_kept_for_other_things_is_not_available():
    assert RankDevice(Cards(1)).available_bytes(kept=3 * GIB) == 5 * GIB
    assert RankDevice(Cards(1)).available_bytes(kept=9 * GIB) == 0


def test_the_processors_share_the_memory_of_the_host():
    device = first_device("cpu", 2)
    assert not device.owned and device.collective_backend == "gloo"
    assert device.description.startswith("cpu:0 ")
    assert device.available_bytes() <= find_platform("cpu").memory().available_bytes
