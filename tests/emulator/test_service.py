"""`firstlight serve --device musa`: real processes on emulated devices, and what they say when the
memory of a device ends.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.accept.convert import convert
from firstlight.adapt.shard import shard
from k3_layouts import write_layout_miniature
from live_service import LiveService
from local_engine import LocalEngine, greedy
from tiny_text_model import write_text_model

FLAGS = ("--device", "musa", "--served-model-name", "tiny", "--context", "512", "--threads", "1")
TOKENS = 8
MIB = 2**20

pytestmark = pytest.mark.slow
Start = Callable[..., LiveService]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: Any) -> dict[str, Path]:
    root: Path = tmp_path_factory.mktemp("served")
    convert(write_text_model(root / "text"), root / "llama3")
    write_layout_miniature(root / "published")
    shard(root / "published", root / "kimi")
    return {"llama3": root / "llama3", "kimi": root / "kimi"}


@pytest.fixture
def start(
    emulated_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Start]:
    """`start(model, *flags, **variables)` starts a service that ends with the test."""
    with ExitStack() as stack:

        def started(model: Path, *flags: str, **variables: str) -> LiveService:
            for name, value in {**emulated_variables, **variables}.items():
                monkeypatch.setenv(name, value)
            service = LiveService(model, tmp_path / "serve.log", *FLAGS, *flags)
            stack.callback(service.close)
            return service

        yield started


@pytest.mark.parametrize("name", ["llama3", "kimi"])
def test_two_devices_serve_what_the_processor_says(
    start: Start, stores: dict[str, Path], name: str
) -> None:
    """Chunked prompts and all; the known answers of the store were asked before it was ready."""
    generator = torch.Generator().manual_seed(11)
    prompt: list[int] = torch.randint(3, 300, (60,), generator=generator).tolist()
    expected = LocalEngine(stores[name]).run([prompt], greedy(TOKENS))[0].token_ids
    flags = ("--tp", "2", "--kv-budget-bytes", "64MiB", "--chunk-tokens", "16")
    service = start(stores[name], *flags).wait_ready()
    answer = service.complete(prompt, max_tokens=TOKENS, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected
    metrics = service.metrics()
    for rank in (0, 1):
        name = f'memory_actual_bytes{{component="kv/{rank}"}}'
        assert metrics[name] == metrics[name.replace("actual", "predicted")] > 0


def test_a_device_too_small_is_refused_in_numbers(start: Start, stores: dict[str, Path]) -> None:
    service = start(stores["kimi"], EMULATED_MUSA_MEMORY=str(4 * MIB))
    assert service.wait_exit(60) == 4
    assert "short by" in service.log and "of 4 MiB" in service.log
    assert "Traceback" not in service.log


def test_memory_that_others_took_meanwhile_ends_the_start_with_ways_out(
    start: Start, stores: dict[str, Path]
) -> None:
    """The plan holds and the allocator fails: torch's error becomes ours, with its exit code."""
    variables = {"EMULATED_MUSA_MEMORY": str(256 * MIB), "EMULATED_MUSA_TAKEN": str(250 * MIB)}
    service = start(
        stores["kimi"], "--kv-budget-bytes", "8MiB", "--encoder-cache-bytes", "1MiB", **variables
    )
    assert service.wait_exit(60) == 4
    assert "rank 0: MUSA out of memory" in service.log and "use more ranks" in service.log
    assert "Traceback" not in service.log
