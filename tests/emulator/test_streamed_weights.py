"""Weights that take turns on the emulated device: copies may be late, and are waited for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.assembly.build import BuildOptions
from firstlight.assembly.source import open_source
from firstlight.kernels.builtin import reference_kernels
from firstlight.parallel.mesh import Mesh
from firstlight.runner.residency import ResidencyLimits, assemble_within
from firstlight.sharding.layout import Layout
from firstlight.sharding.residency import least_budget, rank_weights
from k3_layouts import write_layout_miniature
from local_engine import LocalEngine, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

PROMPTS = random_prompts(5, 33)
TOKENS = 6


def streamed(folder: Path, host_bytes: int, slots: int = 0) -> tuple[list[list[int]], list[str]]:
    """The answers of a model within its least budget, or with all layers and so many slots for
    experts, and the races that were seen."""
    from musa_emulator import control

    source, device = open_source(folder), torch.device("musa:0")
    weights = rank_weights(source.spec.family.table, source.spec.facts, Layout(), 4)
    missing = (sum(weights.experts) - slots) * weights.expert_bytes
    budget = weights.num_bytes - missing if slots else least_budget(weights)
    control.take_races()
    model, residency = assemble_within(
        ResidencyLimits(budget, host_bytes),
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=reference_kernels(),
        options=BuildOptions(torch.float32, device, 512),
    )
    engine = LocalEngine(folder, model=model.module, device=device)
    outcomes = engine.run(PROMPTS, greedy(TOKENS))
    assert residency is not None
    traffic = residency.take_traffic()
    assert traffic.file_bytes if host_bytes == 0 else traffic.host_bytes
    residency.close()
    return [outcome.token_ids for outcome in outcomes], control.take_races()


def answers(folder: Path) -> list[list[int]]:
    return [outcome.token_ids for outcome in LocalEngine(folder).run(PROMPTS, greedy(TOKENS))]


@pytest.mark.parametrize("host_bytes", [0, 2**30])
def test_layers_arrive_before_they_are_used(emulated: Any, tmp_path: Path, host_bytes: int) -> None:
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    assert emulated().run(streamed, tmp_path, host_bytes)[0] == (answers(tmp_path), [])


def test_experts_arrive_before_they_are_used(emulated: Any, tmp_path: Path) -> None:
    write_layout_miniature(tmp_path)
    want = answers(tmp_path)
    for host_bytes in (0, 2**30):
        assert emulated().run(streamed, tmp_path, host_bytes, 14)[0] == (want, [])
    # Here experts arrive in slots beside those that compute: races are seen by allocation.
    assert emulated().run(streamed, tmp_path, 0)[0][0] == want
