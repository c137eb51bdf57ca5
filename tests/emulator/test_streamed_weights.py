"""Weights that take turns on the emulated device: copies may be late, and are waited for."""

from pathlib import Path
from typing import Any

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


def streamed(folder: Path, host_bytes: int) -> tuple[list[list[int]], list[str]]:
    """The answers of a model within its least budget, and the races that were seen."""
    from musa_emulator import control

    source, device = open_source(folder), torch.device("musa:0")
    weights = rank_weights(source.spec.family.table, source.spec.facts, Layout(), 4)
    control.take_races()
    model, residency = assemble_within(
        ResidencyLimits(least_budget(weights), host_bytes),
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


def test_layers_and_experts_arrive_before_they_are_used(emulated: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", tiny_config("qwen3"))
    write_layout_miniature(tmp_path / "kimi")
    for name in ("qwen3", "kimi"):
        folder = tmp_path / name
        want = [o.token_ids for o in LocalEngine(folder).run(PROMPTS, greedy(TOKENS))]
        for host_bytes in (0, 2**30):
            assert emulated().run(streamed, folder, host_bytes)[0] == (want, []), name
