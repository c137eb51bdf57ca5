"""A device with just the memory of a plan serves the load of the plan; with a byte less nobody
tries.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firstlight.accept.convert import convert
from firstlight.adapt.shard import shard
from firstlight.cli.main import main
from k3_layouts import write_layout_miniature
from live_service import LiveService
from tiny_text_model import write_text_model

CONTEXT, SEQUENCES = 384, 2
LOAD = (
    *("--context", str(CONTEXT), "--concurrency", str(SEQUENCES), "--dtype", "float32"),
    *("--chunk-tokens", "128", "--max-batch-tokens", "256", "--encoder-cache-bytes", "64K"),
    *("--reserve-share", "0.1", "--devices", "1xS5000", "--tp", "1"),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores(tmp_path_factory: Any) -> dict[str, Path]:
    root: Path = tmp_path_factory.mktemp("planned")
    convert(write_text_model(root / "text"), root / "llama3")
    write_layout_miniature(root / "published")
    shard(root / "published", root / "kimi")
    return {"llama3": root / "llama3", "kimi": root / "kimi"}


def plan(store: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Runs the verb and returns its exit code and what it printed as data."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(
            ["plan", str(store), "--devices", "1xS5000", "--tp", "1", *LOAD, *words, "--json"]
        )
    return code, json.loads(printed.getvalue())


def least_memory(store: Path) -> int:
    """The smallest device that the plan fits, a tenth of which is kept."""
    components = plan(store)[1]["data"]["plan"]["ranks"][0]["components"]
    needed = sum(size for name, size in components.items() if name != "reserve")
    memory = needed * 10 // 9
    while memory - int(memory * 0.1) < needed:
        memory += 1
    return memory


@pytest.fixture
def serve(
    emulated_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Any]:
    """`serve(store, plan, memory)` starts a service from a plan on a device with such memory."""
    with contextlib.ExitStack() as stack:

        def started(store: Path, path: Path, memory: int, *more: str) -> LiveService:
            for name, value in emulated_variables.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("EMULATED_MUSA_MEMORY", str(memory))
            flags = ("--device", "musa", "--plan", str(path), "--threads", "1", "--skip-gate")
            named = ("--served-model-name", "tiny")
            service = LiveService(store, tmp_path / "serve.log", *flags, *named, *more)
            stack.callback(service.close)
            return service

        yield started


@pytest.mark.parametrize("name", ["llama3", "kimi"])
def test_the_planned_memory_holds_the_planned_load(
    serve: Any, stores: dict[str, Path], tmp_path: Path, name: str
) -> None:
    store, path = stores[name], tmp_path / "plan.json"
    memory = least_memory(store)
    code, _ = plan(store, "--memory-bytes", str(memory), "--plan-path", str(path))
    assert code == 0
    service = serve(store, path, memory).wait_ready()
    prompts = [[5 + (7 * i + n) % 200 for i in range(CONTEXT - 8)] for n in range(SEQUENCES)]
    answer = service.complete(prompts, max_tokens=8, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert [c["finish_reason"] for c in answer.json()["choices"]] == ["length"] * SEQUENCES


def test_a_byte_less_is_refused_by_plan_and_start_in_one_sentence(
    serve: Any, stores: dict[str, Path], tmp_path: Path
) -> None:
    store, path = stores["kimi"], tmp_path / "plan.json"
    memory = least_memory(store)
    assert plan(store, "--memory-bytes", str(memory), "--plan-path", str(path))[0] == 0
    code, report = plan(store, "--memory-bytes", str(memory - 1))
    told = next(c["detail"] for c in report["checks"] if c["name"] == "memory")
    service = serve(store, path, memory - 1, "--memory-bytes", str(memory - 1))
    assert service.wait_exit(60) == 4 and code == 1
    assert "short by" in told and told in service.log
