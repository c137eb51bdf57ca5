"""What is planned for a rank is what it allocates, type by type, and the module takes all of it."""

import pytest
import torch

from firstlight.assembly.build import BuildOptions, allocate, build_on_meta, install, planned_bytes
from firstlight.kernels.builtin import reference_kernels
from firstlight.models.spec import read_model_spec
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from tiny_kimi import linear_config, miniature_config, wide_config

CPU = torch.device("cpu")
CASES = [
    (miniature_config, Layout()),
    (miniature_config, Layout(dp=3, ep=3)),
    (wide_config, Layout(tp=4)),
    (wide_config, Layout(tp=4, ep=2)),
    (linear_config, Layout(tp=3, ep=3)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "layout"), CASES)
def test_planned_bytes_are_allocated_and_installed(make, layout, dtype):
    spec = read_model_spec(make())
    mesh = Mesh(layout.place(layout.world_size - 1))
    parameters = allocate(spec, mesh, BuildOptions(dtype, CPU, 64))
    allocated = sum(t.numel() * t.element_size() for t in parameters.values())
    assert allocated == planned_bytes(spec, mesh, dtype)
    module = build_on_meta(spec, reference_kernels(), 64)
    install(module, parameters, spec)
    assert {n for n, _ in module.named_parameters()} == set(parameters)


def test_rules_keep_types_and_experts_are_stacked():
    spec = read_model_spec(wide_config())
    place = Layout(tp=4, ep=2).place(3)
    parameters = allocate(spec, Mesh(place), BuildOptions(torch.bfloat16, CPU, 64))
    experts = parameters["layers.1.moe.routed.experts.w2_packed"]
    assert experts.dtype == torch.uint8 and experts.shape == (6, 64, 384 // 2 // 2)
    assert parameters["layers.1.moe.routed.experts.w1_scale"].shape == (6, 192, 2)
    kept = {n for n, t in parameters.items() if t.dtype == torch.float32}
    assert {n.rpartition("layers.1.")[2] for n in kept if "layers.1." in n} == {
        *(f"attention.{x}_conv.weight" for x in "qkv"), "attention.A_log", "attention.dt_bias",
        "attention.o_norm.weight", "moe.routed.router.bias",
    }  # fmt: skip
    assert parameters["layers.1.attention.A_log"].shape == (3,)
