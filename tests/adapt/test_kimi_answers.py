"""Known answers of the miniature, made unit by unit while it is converted, are the reference's."""

import json

import pytest
import torch
from safetensors.torch import load_file

from firstlight.adapt.known_answers import AnswerRecorder
from firstlight.adapt.shard import ShardOptions, shard
from firstlight.models.spec import read_model_spec
from tiny_kimi import K3_DATA, MINIATURE, miniature_config


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    case = json.loads((K3_DATA / "cases" / "text_64.json").read_text())
    recorder = AnswerRecorder(read_model_spec(miniature_config()), {"text": case["input_ids"]})
    store = tmp_path_factory.mktemp("store")
    shard(MINIATURE, store, ShardOptions(hook=recorder))
    assert (store / "answers").is_dir()
    return recorder.answers()


def test_answers_agree_with_the_reference(answers):
    logits_TV = load_file(K3_DATA / "cases" / "text_64.safetensors")["logits"]
    logprobs_TV = torch.log_softmax(logits_TV.double(), -1)[:-1]
    known = answers.cases[0]
    assert known.top1 == logprobs_TV.argmax(-1).tolist()
    following = torch.tensor(known.token_ids[1:]).unsqueeze(1)
    wanted_T = logprobs_TV.gather(1, following).squeeze(1)
    assert (torch.tensor(known.logprobs).double() - wanted_T).abs().max() < 2e-3


def test_spreads_are_those_of_rounding(answers):
    """fp64 strays by rounding alone, bf16 about as far as the reference's own bf16 run."""
    tensors = load_file(K3_DATA / "cases" / "text_64.safetensors")
    plain_TV, rounded_TV = (
        torch.log_softmax(tensors[name].double(), -1) for name in ("logits", "logits_bf16ref")
    )
    reference = float((plain_TV - rounded_TV).abs().max())
    assert 0 < answers.spread["float32"] < 1e-3
    assert reference / 4 < answers.spread["bfloat16"] < reference * 1.5
