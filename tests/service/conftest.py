"""Fixtures of the service's tests: tiny stores, and real services that leave nothing running."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from firstlight.accept.convert import convert

sys.path.insert(0, str(Path(__file__).parent))
from live_service import LiveService
from tiny_text_model import write_text_model

StartService = Callable[..., LiveService]
# Small enough for every machine, and still room for one answer of thousands of tokens.
SMALL = ("--served-model-name", "tiny", "--kv-budget-bytes", "64MiB", "--threads", "1")


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a tiny text model, with tokenizer and known answers."""
    folder = tmp_path_factory.mktemp("tiny")
    convert(write_text_model(folder / "checkpoint"), folder / "store")
    return folder / "store"


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[StartService]:
    """`start_service(model, *flags)` starts a service that ends with the test."""
    with ExitStack() as stack:

        def start(model: Path, *flags: str) -> LiveService:
            service = LiveService(model, tmp_path / "serve.log", *SMALL, *flags)
            stack.callback(service.close)
            return service

        yield start


@pytest.fixture(scope="session")
def shared_service(
    tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """A ready service on two ranks that many tests share and none may harm."""
    log = tmp_path_factory.mktemp("shared") / "serve.log"
    service = LiveService(tiny_store, log, *SMALL, "--tp", "2")
    try:
        yield service.wait_ready()
    finally:
        service.close()
