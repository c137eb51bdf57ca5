"""Every tensor of a checkpoint is matched, ignored with a reason, or an error by name."""

import json

import pytest
import torch

from firstlight.checkpoint.names import match_names, prove_tied, require_match
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.errors import TensorError
from firstlight.models.spec import read_model_spec
from tiny_checkpoints import FAMILIES, random_tensors, tiny_config, write_checkpoint, write_weights


def open_with(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, tensors)
    return open_checkpoint(folder), read_model_spec(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_matches(tmp_path, family):
    tensors = write_checkpoint(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path)
    report = require_match(checkpoint, read_model_spec(checkpoint.config()))
    assert {m.rule.source for m in report.matched} == set(tensors)
    assert report.findings() == ()


def test_all_differences_are_listed_at_once(tmp_path):
    config = tiny_config()
    tensors = random_tensors(read_model_spec(config))
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 16)
    tensors["lm_head.weight"] = torch.zeros(199, 16)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(16, 16, dtype=torch.int8)
    checkpoint, spec = open_with(tmp_path, config, tensors)
    with pytest.raises(TensorError) as caught:
        require_match(checkpoint, spec)
    text = str(caught.value)
    assert "5 defects" in text
    assert "model.norm.weight: missing" in text
    assert "model.layers.1.mlp.up_proj.weight: missing" in text
    assert "model.layers.2.mlp.up_proj.weight: unexpected" in text
    assert "lm_head.weight: shape [199, 16] in the file, [200, 16] by the config" in text
    assert "q_proj.weight: I8 values" in text


def test_known_leftovers_are_ignored_with_the_reason(tmp_path):
    config = tiny_config()
    tensors = random_tensors(read_model_spec(config))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    report = match_names(*[c.tensors if i == 0 else c for i, c in enumerate(
        open_with(tmp_path, config, tensors))])  # fmt: skip
    assert [reason for _, reason in report.ignored] == ["recomputed from the config"]
    assert not report.unexpected


def tied_checkpoint(folder, change):
    config = tiny_config("llama-tied")
    tensors = random_tensors(read_model_spec(config))
    head = tensors["model.embed_tokens.weight"].clone()
    change(head)
    return open_with(folder, config, {**tensors, "lm_head.weight": head})


def test_an_equal_tied_tensor_is_proven(tmp_path):
    checkpoint, spec = tied_checkpoint(tmp_path, lambda head: None)
    assert prove_tied(checkpoint, require_match(checkpoint, spec)) == ()


def test_a_tied_tensor_that_differs_in_one_bit_is_reported(tmp_path):
    def flip(head):
        head.view(torch.int32)[123, 4] ^= 1

    checkpoint, spec = tied_checkpoint(tmp_path, flip)
    (finding,) = prove_tied(checkpoint, require_match(checkpoint, spec))
    assert "lm_head.weight" in finding.where and "row 123" in finding.what
