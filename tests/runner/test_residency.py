"""Weights that do not fit: the tokens and logits of those that do, within whatever budget."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.adapt.shard import shard
from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.checkpoint.store import Store
from firstlight.errors import DigestMismatch, OutOfBudget
from firstlight.kernels.builtin import reference_kernels
from firstlight.kernels.registry import KernelSet
from firstlight.layers.packed_batch import pack_whole
from firstlight.parallel.mesh import Mesh
from firstlight.runner.piece_feed import CHECK_EVERY
from firstlight.runner.residency import Residency, ResidencyLimits, assemble_within
from firstlight.sharding.layout import Layout
from firstlight.sharding.residency import RankWeights, least_budget, rank_weights
from k3_layouts import write_layout_miniature
from k3_oracle import CHECKPOINT
from local_engine import CPU, LocalEngine, fast_kernels, greedy, random_prompts
from tiny_models import tiny_config, write_checkpoint

TOKENS = 6
PROMPTS = random_prompts(5, 33, 17)
OPTIONS = BuildOptions(torch.float32, CPU, 512)
MODELS = ("smollm2", "qwen3", "k3-store", "k3-direct", "dense-experts")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    root: Path = tmp_path_factory.mktemp("models")
    for name in ("smollm2", "qwen3"):
        write_checkpoint(root / f"{name}-source", tiny_config(name, num_hidden_layers=6))
        shard(root / f"{name}-source", root / name)
    shard(CHECKPOINT, root / "k3-store")
    write_layout_miniature(root / "dense-experts", quantised=False)
    found = {name: root / name for name in MODELS}
    return {**found, "k3-direct": CHECKPOINT}


def weights_of(folder: Path) -> RankWeights:
    spec = open_source(folder).spec
    return rank_weights(spec.family.table, spec.facts, Layout(), 4)


def build(
    folder: Path, budget: int, kernels: KernelSet | None = None, host_bytes: int = 0
) -> tuple[Any, Residency]:
    source = open_source(folder)
    model, residency = assemble_within(
        ResidencyLimits(budget, host_bytes),
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=kernels or reference_kernels(),
        options=OPTIONS,
    )
    assert residency is not None
    return model, residency


@torch.inference_mode()
def logits(module: Any) -> torch.Tensor:
    ids_T = torch.tensor(PROMPTS[1])
    return module.head(module(ids_T, pack_whole([len(ids_T)]))).clone()


def answers(folder: Path, module: Any, kernels: KernelSet) -> list[Any]:
    """Tokens with their log-probabilities: equal only if all bits before them are."""
    engine = LocalEngine(folder, kernels=kernels, model=module)
    outcomes = engine.run(PROMPTS, greedy(TOKENS, logprobs=0))
    return [(o.token_ids, [token.logprob for token in o.logprobs]) for o in outcomes]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_streamed_weights_give_the_same_numbers(
    folders: dict[str, Path], name: str, fast: bool
) -> None:
    folder, kernels = folders[name], fast_kernels() if fast else reference_kernels()
    source = open_source(folder)
    whole = assemble(
        source.spec, source.weights, mesh=Mesh(Layout().place(0)), kernels=kernels, options=OPTIONS
    )
    want = answers(folder, whole.module, kernels)
    weights = weights_of(folder)
    least = least_budget(weights)
    for budget in (least, (least + weights.num_bytes) // 2):
        model, residency = build(folder, budget, kernels)
        assert model.planned_bytes == model.allocated_bytes <= budget
        if not fast:  # packed attention needs a cache
            assert torch.equal(logits(model.module), logits(whole.module))
        assert answers(folder, model.module, kernels) == want
        assert residency.take_traffic().file_bytes > 0
        if name.endswith("store"):
            assert model.report.digest == whole.report.digest
        residency.close()


@settings(max_examples=6, deadline=None)
@given(share=st.floats(0, 1), host=st.floats(0, 1), name=st.sampled_from(["qwen3", "k3-store"]))
def test_any_budget_gives_the_same_logits(
    folders: dict[str, Path], share: float, host: float, name: str
) -> None:
    weights = weights_of(folders[name])
    least, most = least_budget(weights), weights.num_bytes - 1
    want = whole_logits(folders[name])
    budget, host_bytes = least + int(share * (most - least)), int(host * most)
    model, residency = build(folders[name], budget, host_bytes=host_bytes)
    assert held_bytes(model.module) <= budget
    assert torch.equal(logits(model.module), want)
    assert torch.equal(logits(model.module), want)  # the second step begins with other contents
    residency.close()


@cache
def whole_logits(folder: Path) -> torch.Tensor:
    source, mesh = open_source(folder), Mesh(Layout().place(0))
    kernels = reference_kernels()
    return logits(
        assemble(source.spec, source.weights, mesh=mesh, kernels=kernels, options=OPTIONS).module
    )


def held_bytes(module: Any) -> int:
    """Bytes of all memory that parameters lie in, buffers and slots counted once."""
    memory = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in module.parameters()}
    return sum(storage.nbytes() for storage in memory.values())


def test_host_memory_spares_the_files(folders: dict[str, Path]) -> None:
    for name in ("qwen3", "k3-store"):
        weights = weights_of(folders[name])
        least = least_budget(weights)
        model, residency = build(folders[name], least, host_bytes=2 * weights.num_bytes)
        assert torch.equal(logits(model.module), whole_logits(folders[name]))
        traffic = residency.take_traffic()
        assert traffic.file_bytes == 0 and traffic.host_bytes > 0
        residency.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-source", "k3-store"])
def test_a_byte_flipped_while_serving_ends_it(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """Found where it is read again, at the latest at the 16th time, and named."""
    shutil.copytree(folders["qwen3"].parent / name, tmp_path / "copy")
    weights = weights_of(tmp_path / "copy")
    model, residency = build(tmp_path / "copy", least_budget(weights))
    layer = (residency.plan.streamed or (3,))[-1]
    path = damage(tmp_path / "copy", name, layer)
    with pytest.raises(DigestMismatch, match=f"{path.name}.*damaged|{path.name}.*not what it was"):
        for _ in range(CHECK_EVERY + 1):
            logits(model.module)
    residency.close()


def damage(folder: Path, name: str, layer: int) -> Path:
    """Flips a bit of a matrix of a layer, or of every expert of it."""
    source = open_source(folder).weights
    if isinstance(source, Store):
        path = source.bin_path(f"layer-{layer:03d}")
        size = path.stat().st_size
        places = range(0, size, 64) if name.startswith("k3") else range(size // 2, size // 2 + 1)
    else:
        info = source.tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
        path, places = info.file, range(info.offset, info.offset + 1)
    with path.open("r+b", buffering=0) as file:  # in place: the file stays open for its readers
        for at in places:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    return path


def test_a_damaged_file_is_found_before_anything_is_served(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["qwen3"], tmp_path / "copy")
    budget = least_budget(weights_of(tmp_path / "copy"))
    damage(tmp_path / "copy", "qwen3", 2)
    with pytest.raises(DigestMismatch, match=r"layer-002\.bin"):
        build(tmp_path / "copy", budget)


def test_a_budget_below_the_least_is_refused_with_it(folders: dict[str, Path]) -> None:
    weights = weights_of(folders["k3-store"])
    least = least_budget(weights)
    with pytest.raises(OutOfBudget, match=f"at least {least} bytes"):
        build(folders["k3-store"], least - 1)
