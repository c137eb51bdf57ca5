"""Tests of the swap for packed modules: same tokens, shared weights shared, memory given back."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from firstlight.assembly.build import AssembledModel, BuildOptions, assemble
from firstlight.assembly.pack import pack_modules
from firstlight.assembly.source import open_source
from firstlight.kernels.builtin import reference_kernels
from firstlight.kernels.registry import KernelSet
from firstlight.layers.packed_modules import (
    PackedEmbedding,
    PackedGatedMLP,
    PackedGroupedQueryAttention,
    PackedLinear,
)
from firstlight.parallel.mesh import Mesh
from firstlight.runner.model_runner import ModelRunner, RunnerContext
from firstlight.sharding.layout import Layout
from local_engine import EngineShape, LocalEngine, fast_kernels, greedy
from tiny_models import CONFIGS, tiny_config, write_checkpoint

KERNELS = fast_kernels()
PROMPTS = [list(range(5, 150)), list(range(7, 20)), [3], *([n, n + 1] for n in range(12))]
packs = pytest.mark.skipif(not KERNELS.packs_weights, reason="no kernels for packed weights here")


def _affine(weight: torch.Tensor) -> torch.Tensor:
    """Round to 16 steps of each block of 32, as a 4-bit checkpoint would hold."""
    blocks = weight.view(len(weight), -1, 32)
    least, most = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step, base = ((most - least) / 15).half().float(), least.half().float()
    q = ((blocks - base) / step).round().clamp(0, 15)
    q[..., 0], q[..., 31] = 0, 15
    return (q * step + base).view(weight.shape)


def _checkpoint(folder: Path, name: str, kind: str = "float32") -> Path:
    write_checkpoint(folder, tiny_config(name, vocab_size=320))
    path = folder / "model.safetensors"
    change = {"affine4": _affine, "bfloat16": lambda w: w.bfloat16().float()}.get(kind)
    if change is not None:
        weights = load_file(path)
        save_file({n: change(w) if w.dim() == 2 else w for n, w in weights.items()}, path)
    return folder


def _assembled(folder: Path, kernels: KernelSet = KERNELS, *, pack: bool = True) -> AssembledModel:
    source = open_source(folder)
    options = BuildOptions(torch.float32, torch.device("cpu"), 512, pack=pack)
    mesh = Mesh(Layout().place(0))
    return assemble(source.spec, source.weights, mesh=mesh, kernels=kernels, options=options)


def _tokens(folder: Path, model: nn.Module) -> list[list[int]]:
    engine = LocalEngine(folder, EngineShape(), KERNELS)
    context = RunnerContext(model, engine.states, KERNELS, torch.device("cpu"), samples=True)
    engine.runner = ModelRunner(context, engine.runner._table)
    return [outcome.token_ids for outcome in engine.run(PROMPTS, greedy(20))]


@packs
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "affine4"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_packing_changes_no_token(tmp_path: Path, name: str, kind: str) -> None:
    folder = _checkpoint(tmp_path / "model", name, kind)
    packed = _assembled(folder)
    assert packed.packed is not None and set(packed.packed.formats) == {kind}
    plain = _assembled(folder, pack=False)
    assert plain.packed is None
    assert _tokens(folder, packed.module) == _tokens(folder, plain.module)


@packs
def test_modules_are_swapped_and_tied_weights_are_packed_once(tmp_path: Path) -> None:
    model = _assembled(_checkpoint(tmp_path / "model", "smollm2", "affine4"))
    layer = model.module.layers[0]
    assert isinstance(layer.attention, PackedGroupedQueryAttention)
    assert isinstance(layer.mlp, PackedGatedMLP)
    assert isinstance(model.module.embed, PackedEmbedding)
    assert isinstance(model.module.head.lm_head, PackedLinear)
    assert model.module.head.lm_head.weight.packed is model.module.embed.weight.packed
    assert model.packed is not None
    assert model.packed.formats == {"affine4": 1 + 7 * 4}
    assert model.packed.bytes_before * 20 == model.packed.bytes_after * 128


@packs
def test_dense_weights_are_freed() -> None:
    module = nn.Sequential(nn.Linear(64, 32), nn.Embedding(10, 32)).requires_grad_(False)
    for layer in module:
        layer.weight.data = layer.weight.bfloat16().float()
    storages = [weakref.ref(layer.weight.untyped_storage()) for layer in module]
    kept = module[0].weight
    bias = module[0].bias
    report = pack_modules(module, KERNELS)
    gc.collect()
    assert kept.numel() == 0 and all(storage() is None for storage in storages)
    assert module[0].bias is bias
    assert report.formats == {"bfloat16": 2}
    assert report.bytes_before == 2 * report.bytes_after == 4 * (64 * 32 + 320)


@packs
def test_other_dtypes_stay() -> None:
    module = nn.Sequential(nn.Linear(64, 32).bfloat16())
    assert pack_modules(module, KERNELS).formats == {} and type(module[0]) is nn.Linear


def test_references_pack_nothing(tmp_path: Path) -> None:
    model = _assembled(_checkpoint(tmp_path / "model", "llama2"), reference_kernels())
    assert model.packed is not None and model.packed.formats == {}
    assert type(model.module.embed) is nn.Embedding
