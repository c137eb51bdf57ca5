"""Fixtures every test may use: the real model file, gloo ranks, and the torch-free selection."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fetch_smollm2
import rank_pool
from one_at_a_time import one_at_a_time
from torch_use import needs_torch

# Tests share two cores with the processes they start: threads that spin take them away.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Their files take longest. Dealt out first, they leave no process waiting for another at the end.
LONGEST = ("service", "emulator", "training")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --torch-free: run only the test files that can run where torch is not installed."""
    parser.addoption(
        "--torch-free",
        action="store_true",
        help="only test files that import, directly or through firstlight, no torch",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files that need torch when --torch-free is given."""
    if not config.getoption("--torch-free"):
        return None
    # A folder whose fixtures need torch is left out whole.
    path = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    if path.suffix != ".py" or not path.exists() or path == Path(__file__):
        return None
    return True if needs_torch(path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one of several test processes: the longest files come first."""
    if hasattr(config, "workerinput"):
        tests = Path(__file__).parent
        items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in LONGEST)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The checked SmolLM2-135M-Instruct GGUF; a failed download fails the tests that need it."""
    with one_at_a_time("smollm2"):
        return fetch_smollm2.fetch()


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[rank_pool.RankPool]:
    """The pool behind `ranks`; no process starts before a test asks for ranks."""
    pool = rank_pool.RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_processes: rank_pool.RankPool) -> Callable[..., rank_pool.RankGroup]:
    """`ranks(n).run(function, *args)` calls a module-level function on n gloo ranks.

    Results come in rank order. Failures raise RankFailure, a RuntimeError with `rank`,
    `exception` and `traceback`, whose cause is the rank's own exception.
    """
    return rank_processes.group
