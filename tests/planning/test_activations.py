"""Counts the bytes alive in real forward passes of the plain kernels, beside what is planned."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from firstlight.cache.manager import distinct_specs
from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native
from firstlight.kernels.registry import KernelSet
from firstlight.layers.packed_batch import PackedBatch
from firstlight.models.kimi_k3.vision import ImageProjector, VisionTower
from firstlight.models.kimi_k3.vision_config import VisionConfig
from firstlight.models.spec import read_model_spec
from firstlight.planning.activations import StepShape, activation_bytes, encoder_bytes
from firstlight.planning.work import model_work
from firstlight.runner.cache_tensors import CacheShape, allocate_states
from firstlight.runner.live_tensors import LiveTensors
from firstlight.sharding.layout import Layout

CPU = torch.device("cpu")


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes alive at once of those that `work` allocates."""
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def whole_pass(
    spec, dtype: torch.dtype, tokens: int, context: int, kernels: KernelSet | None = None
) -> Callable[[], object]:
    kernels = kernels or reference_kernels()
    module = spec.family.builder()(spec.config, kernels, spec.context_length)
    for parameter in module.parameters():
        if parameter.dtype != torch.uint8:
            parameter.data = torch.randn(parameter.shape).mul(0.05).to(dtype)
        else:
            parameter.data.fill_(127)  # as codes some values, as scales 1
    pages = context // 16 + 2
    states = allocate_states(spec.states, CacheShape(pages, 16, 1, dtype, CPU, 3))
    tables = tuple(
        torch.tensor([[1]]) if group.kind == "recurrent" else torch.arange(1, pages)[None]
        for group in distinct_specs(spec.states)
    )
    batch = PackedBatch(
        positions_T=torch.arange(tokens),
        bounds=(0, tokens),
        starts_B1=torch.tensor([0, tokens], dtype=torch.int32),
        contexts_B=torch.tensor([context], dtype=torch.int32),
        tables=tuple(table.int() for table in tables),
    )
    ids = torch.arange(tokens) % spec.vocab_size
    return lambda: module(ids, batch, states)


SHAPES = [(128, 128), (256, 256), (512, 512), (128, 2048), (96, 4096), (160, 6000), (192, 3000)]


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "context"), SHAPES)
def test_a_step_of_kimi_k3_needs_what_is_planned(mini, name, tokens, context):
    measured = peak_bytes(whole_pass(mini, getattr(torch, name), tokens, context))
    shape = StepShape(tokens, tokens, context, sequences=1)
    planned = activation_bytes(model_work(mini, name), Layout(), shape)
    assert planned == pytest.approx(measured, rel=0.05), f"{planned / measured - 1:+.1%}"


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "context"), [s for s in SHAPES if s[1] <= 4096])
def test_a_step_of_a_dense_model_needs_what_is_planned(dense, name, tokens, context):
    measured = peak_bytes(whole_pass(dense, getattr(torch, name), tokens, context))
    shape = StepShape(tokens, tokens, context, sequences=1)
    planned = activation_bytes(model_work(dense, name), Layout(), shape)
    assert planned == pytest.approx(measured, rel=0.10), f"{planned / measured - 1:+.1%}"


@pytest.mark.skipif(load_native().module is None, reason="no native kernels here")
@pytest.mark.parametrize("name", ["mini", "dense"])
@pytest.mark.parametrize(("tokens", "context"), [(64, 64), (256, 256), (128, 2048)])
def test_a_step_of_native_kernels_needs_what_is_planned(request, name, tokens, context):
    spec, kernels = request.getfixturevalue(name), builtin_kernels().resolve(machine_query())
    native = {line.partition(": ")[0] for line in kernels.describe() if ": native" in line}
    if not {"paged_attention", "latent_attention"} <= native:
        pytest.skip("this processor lacks what native attention needs")
    work = whole_pass(spec, torch.float32, tokens, context, kernels)
    with torch.inference_mode():
        work()  # what kernels keep for themselves is no step's
    measured = peak_bytes(work)
    shape = StepShape(tokens, tokens, context, sequences=1)
    planned = activation_bytes(model_work(spec, "float32"), Layout(), shape, native)
    assert planned == pytest.approx(measured, rel=0.05), f"{planned / measured - 1:+.1%}"
    with torch.inference_mode(), LiveTensors() as live:
        work()
    assert live.peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("side", [16, 32, 48])
def test_an_image_needs_what_is_planned(k3_work, side):
    vision = k3_work.spec.config.vision
    small = VisionConfig(**{**vars(vision), "blocks": 1, "projector_size": 512})
    tower = VisionTower(small, reference_kernels()).to(torch.bfloat16)
    projector = ImageProjector(small, reference_kernels()).to(torch.bfloat16)
    pixels = torch.zeros(side * side, 3, 14, 14, dtype=torch.bfloat16)
    measured = peak_bytes(lambda: [projector(m) for m in tower(pixels, [(1, side, side)])])
    assert encoder_bytes(k3_work, side * side) == pytest.approx(measured, rel=0.10)


def test_a_dense_model_of_other_shape_needs_what_is_planned():
    """Shapes that no coefficient was chosen by."""
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
    }
    other = read_model_spec(config)
    for tokens, context in ((200, 200), (400, 1000), (64, 3500)):
        measured = peak_bytes(whole_pass(other, torch.float32, tokens, context))
        shape = StepShape(tokens, tokens, context, sequences=1)
        planned = activation_bytes(model_work(other, "float32"), Layout(), shape)
        assert planned == pytest.approx(measured, rel=0.15), f"{planned / measured - 1:+.1%}"
