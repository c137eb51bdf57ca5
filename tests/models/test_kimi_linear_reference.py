"""Kimi Linear against transformers, on a random checkpoint with the published names."""

import json

import pytest
import torch
from safetensors.torch import save_file

from firstlight.assembly.build import BuildOptions, assemble
from firstlight.assembly.source import open_source
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.packed_batch import pack_whole
from firstlight.models.spec import read_model_spec
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Layout
from tiny_kimi import linear_config

LENGTHS = (5, 33, 70)


def gentle_weights(spec):
    """Matrices of unit gain, norms near 1, biases and decays near 0: logits that say something."""
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for rule in spec.tensors:
        values = torch.randn(rule.shape, generator=generator)
        if "norm" in rule.name:
            weights[rule.source] = 1 + 0.2 * values
        elif rule.name.endswith(("A_log", "dt_bias", "router.bias")):
            weights[rule.source] = 0.3 * values
        else:
            weights[rule.source] = values * rule.shape[-1] ** -0.5
    return weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("linear"), linear_config(vocab_size=300)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(gentle_weights(read_model_spec(config)), folder / "model.safetensors")
    return folder


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 300, (n,), generator=generator) for n in LENGTHS]


def test_logits_equal_transformers(checkpoint):
    transformers = pytest.importorskip("transformers")
    fields = json.loads((checkpoint / "config.json").read_text())
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.KimiLinearConfig(**fields, **tokens)
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(
        checkpoint, config=config, dtype=torch.float32
    )
    source = open_source(checkpoint)
    ours = assemble(
        source.spec,
        source.weights,
        mesh=Mesh(Layout().place(0)),
        kernels=reference_kernels(),
        options=BuildOptions(torch.float32, torch.device("cpu"), 128),
    ).module
    with torch.inference_mode():
        want = torch.cat([theirs(ids[None]).logits[0] for ids in prompts()])
        logits = ours.head(ours(torch.cat(prompts()), pack_whole(LENGTHS)))
    assert want.std() > 0.3
    assert (logits - want).abs().max() <= 1e-4
