"""The real Kimi K3, all 93 layers, built and cut without storage."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from firstlight.assembly.build import rehearse_rank
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.experts import Mxfp4Experts
from firstlight.models.spec import read_model_spec
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout

CONFIG = Path(__file__).parents[1] / "data" / "k3" / "real" / "config.json"
# 191.8 GiB: an eighth of what is cut, all of what every rank holds (adapt/test_inspect says why).
BYTES_AT_TP_8 = 205_951_299_312


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """A world of eight ranks of which only the last is real; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 8])
def test_a_rank_of_eight(fake_world: Any, ep: int) -> None:
    spec = read_model_spec(json.loads(CONFIG.read_text("utf-8")))
    mesh = Mesh(Layout(tp=8, ep=ep).place(7), fake_world)
    module: Any
    module, num_bytes = rehearse_rank(spec, mesh, kernels=reference_kernels(), dtype=torch.bfloat16)
    assert num_bytes == BYTES_AT_TP_8
    assert len(module.layers) == 93 and all(p.is_meta for p in module.parameters())
    experts = [m for m in module.modules() if isinstance(m, Mxfp4Experts)]
    assert len(experts) == 92
    assert {m.first for m in experts} == {7 * 896 // 8 if ep == 8 else 0}
    shape = (896 // ep, 3072 * ep // 8, 1792)
    assert {tuple(m.w1_packed.shape) for m in experts} == {shape}
