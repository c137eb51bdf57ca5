"""What is exported is what was trained: to the bit, once rounded, and as the loader reads it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.adapt.inspect import inspect_path
from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.errors import ConfigError
from firstlight.layers.experts import Mxfp4Experts, to_dense
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from firstlight.training.examples import make_batch
from firstlight.training.export import INDEX_FILE, export_checkpoint
from firstlight.training.model import Trainable, build_trainable
from firstlight.training.operations import training_kernels
from firstlight.training.published import as_published
from tiny_training import Echo, tiny_config


def read_back(folder: Path) -> Trainable:
    """The exported model, its experts as dense matrices of the same values."""
    source = open_source(folder)
    module: Any = assemble(
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=training_kernels(),
        options=BuildOptions(torch.float32, torch.device("cpu"), 0, pack=False),
    ).module
    for layer in module.layers:
        if hasattr(layer, "moe"):
            held = layer.moe.routed.experts
            assert isinstance(held, Mxfp4Experts)
            layer.moe.routed.experts = to_dense(held, torch.float32)
    return Trainable(module, source.spec)


def exported(folder: Path) -> Trainable:
    model = build_trainable(tiny_config(), training_kernels(), 1)
    values = {name: p.detach() for name, p in model.module.named_parameters()}
    export_checkpoint(values, tiny_config(quantised=True), folder)
    return model


def test_the_exported_forward_is_the_rounded_one_bit_for_bit(tmp_path: Path) -> None:
    model = exported(tmp_path)
    batch = make_batch([Echo(9).example(random.Random(n)) for n in range(3)])
    with torch.no_grad(), as_published(model):
        want = model.logits(batch)
        plain = {name: p.clone() for name, p in model.module.named_parameters()}
    with torch.no_grad():
        found = read_back(tmp_path).logits(batch)
        own = model.logits(batch)
    assert torch.equal(found, want)
    assert not torch.equal(own, want) and (own - want).std() < 0.2 * own.std()
    changed = [n for n, p in model.module.named_parameters() if not torch.equal(p, plain[n])]
    assert any("experts" in name for name in changed), "rounding was not undone"


def test_files_are_those_of_the_published_layout(tmp_path: Path) -> None:
    exported(tmp_path)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    files = index["weight_map"]
    file_of = {
        "language_model.model.layers.3.self_attn.kv_b_proj.weight": "model-00004-of-000007",
        "language_model.lm_head.weight": "model-00005-of-000007",
        "mm_projector.proj.0.weight": "model-00006-of-000007",
        "vision_tower.encoder.final_layernorm.weight": "model-00007-of-000007",
    }
    assert {name: files[name] for name in file_of} == {
        name: f"{file}.safetensors" for name, file in file_of.items()
    }
    held = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert index["metadata"]["total_size"] < held < index["metadata"]["total_size"] + 64_000


def test_inspect_finds_nothing_missing_or_unknown(tmp_path: Path) -> None:
    exported(tmp_path)
    report = inspect_path(tmp_path)
    assert report.sound and report.legal_tp == (1, 2, 4)
    assert report.tensors_by_dtype["U8"] == 3 * 4 * 3 * 2  # layers, experts, matrices, two parts


def test_a_folder_with_weights_is_not_written_over(tmp_path: Path) -> None:
    exported(tmp_path)
    with pytest.raises(ConfigError, match="already"):
        exported(tmp_path)
