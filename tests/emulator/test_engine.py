"""The engine on the emulated device: its own tokens, on one rank and on two, to the last one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from firstlight.parallel.mesh import Mesh
from firstlight.schedule.request import SamplingParams
from firstlight.sharding.layout import Layout
from k3_layouts import write_layout_miniature
from local_engine import EngineShape, LocalEngine, Outcome, greedy
from tiny_models import tiny_config, write_checkpoint

TOKENS = 8
# Chunks, shared steps of prompts and answers, and preemption.
SHAPE = EngineShape(num_blocks=32, block_size=4, max_batch_tokens=48, chunk_tokens=13)
DRAWN = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=5, top_p=0.9, min_p=0.01)
PENALISED = greedy(TOKENS, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=2)
MODELS = ("llama3", "qwen3", "smollm2", "kimi")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    root: Path = tmp_path_factory.mktemp("models")
    for name in MODELS[:-1]:
        write_checkpoint(root / name, tiny_config(name))
    write_layout_miniature(root / "kimi")
    return {name: root / name for name in MODELS}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 33, 1, 64]
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]


def outcomes(folder: Path, place: str = "cpu", tp: int = 1) -> list[list[Outcome]]:
    """Greedy, drawn and penalised answers of one engine."""
    rank = dist.get_rank() if tp > 1 else 0
    mesh = Mesh(Layout(tp=tp).place(rank), dist.group.WORLD if tp > 1 else None)
    device = torch.device(f"{place}:{rank}" if place != "cpu" else place)
    if place != "cpu":
        torch.accelerator.set_device_index(rank)
    engine = LocalEngine(folder, SHAPE, device=device, mesh=mesh)
    assert all(p.device == device for p in engine.model.parameters())
    kinds = (greedy(TOKENS, prompt_logprobs=0), DRAWN, PENALISED)
    return [engine.run(prompts(), params) for params in kinds]


def on_device(folder: Path, tp: int = 1) -> tuple[list[list[Outcome]], list[str], int]:
    """The answers, the races that were seen, and bytes of the device that were used at most."""
    from musa_emulator import control

    found = outcomes(folder, "musa", tp)
    return found, control.take_races(), torch.musa.max_memory_allocated()


def tokens(found: list[list[Outcome]]) -> list[list[list[int]]]:
    return [[outcome.token_ids for outcome in kind] for kind in found]


@pytest.fixture(scope="module", params=MODELS)
def expected(request: Any, folders: dict[str, Path]) -> tuple[Path, list[list[list[int]]]]:
    folder = folders[request.param]
    return folder, tokens(outcomes(folder))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_device_answers_as_the_processor_does(emulated: Any, expected: Any, tp: int) -> None:
    folder, answers = expected
    for found, races, used in emulated(tp).run(on_device, folder, tp):
        assert tokens(found) == answers
        assert races == []
        assert used > 100_000
        assert all(outcome.finish == "length" for kind in found for outcome in kind)
