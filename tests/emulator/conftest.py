"""Processes in which torch finds the emulated device where the vendor's plug-in would be.

This process never loads it: torch would then take it for the accelerator of all other tests.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from one_at_a_time import one_at_a_time
from rank_pool import RankGroup, RankPool

HERE = Path(__file__).parent
SITE = str(HERE / "site")
Emulated = Callable[..., RankGroup]


@pytest.fixture(scope="session")
def emulator_path() -> str:
    """The folder to be put on PYTHONPATH; the device is built when it was not."""
    command = [sys.executable, str(HERE / "build.py")]
    with one_at_a_time("emulated-device"):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return SITE


@pytest.fixture(scope="session")
def emulated_variables(emulator_path: str) -> dict[str, str]:
    """What the environment of a process with two emulated S5000 needs."""
    paths = [emulator_path, *(path for path in sys.path if path)]
    return {"PYTHONPATH": os.pathsep.join(paths), "EMULATED_MUSA_DEVICES": "2"}


@pytest.fixture(scope="session")
def device_pools(emulator_path: str) -> Iterator[Callable[..., RankPool]]:
    """Pools by what is emulated; each is started once a run."""
    pools: dict[tuple[int, tuple[tuple[str, str], ...]], RankPool] = {}

    def pool(ranks: int, **variables: str) -> RankPool:
        key = (ranks, tuple(sorted(variables.items())))
        if key not in pools:
            backend = "mccl" if variables.get("EMULATED_MUSA_ARCH") != "21" else "gloo"
            given = {"PYTHONPATH": emulator_path, "EMULATED_MUSA_DEVICES": "2", **variables}
            pools[key] = RankPool(ranks, backend=backend, variables=given)
        return pools[key]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture
def emulated(device_pools: Callable[..., RankPool]) -> Emulated:
    """`emulated(n, **variables).run(function)` calls a function on n ranks, one device each."""

    def group(ranks: int = 1, **variables: str) -> RankGroup:
        return device_pools(2 if not variables else 1, **variables).group(ranks)

    return group
