"""A Kimi config is read whole: every field is used, ignored by name, or refused by name."""

import copy
import gzip
import json
from math import prod

import pytest

from firstlight.errors import ConfigError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.state_spec import LatentState, RecurrentState
from tiny_kimi import K3_DATA, linear_config, miniature_config, wide_config

WIDTHS = {"": 2, "F32": 4, "U8": 1}


@pytest.fixture(scope="module")
def real():
    return read_model_spec(json.loads((K3_DATA / "real" / "config.json").read_text()))


def test_the_real_config_names_every_published_tensor_and_byte(real):
    with gzip.open(K3_DATA / "real" / "model.safetensors.index.json.gz") as file:
        index = json.load(file)
    assert {rule.source for rule in real.tensors} == set(index["weight_map"])
    num_bytes = sum(prod(rule.shape) * WIDTHS[rule.dtype] for rule in real.tensors)
    assert num_bytes == index["metadata"]["total_size"] == 1_560_860_324_864


def test_the_real_config_gives_the_published_layers_and_states(real):
    config = real.config
    assert [n for n, mla in enumerate(config.is_mla) if mla] == [*range(3, 92, 4), 92]
    assert config.is_moe == (False, *[True] * 92)
    assert config.situ == type(config.situ)(4.0, 25.0) and config.residual_block == 12
    assert (config.mla.qk_dim, config.mla.cached_width) == (192, 576)
    assert real.states[0] == RecurrentState(96, 128, 128, 36_864, 3)
    assert real.states[3] == LatentState(576)
    kda = sum(state.sequence_bytes(1, 2) for state in real.states)
    assert kda == 449_372_160
    assert sum(state.token_bytes(8, 2) for state in real.states) == 27_648
    assert config.context_length == real.context_length == 1_048_576


def test_kimi_linear_is_the_plain_form():
    spec = read_model_spec(linear_config())
    config = spec.config
    assert config.kda.gate_lower_bound is None and not config.kda.full_rank_gate
    assert config.situ is None and config.residual_block is None and config.vision is None
    assert config.moe.latent is None and config.mla.q_rank is None and not config.mla.output_gate
    names = {rule.name for rule in spec.tensors if rule.layer in (1, 3)}
    assert {"layers.1.attention.g_a_proj.weight", "layers.3.attention.q_proj.weight"} <= names
    assert "layers.1.moe.routed.experts.w1" in names and "layers.1.moe.norm.weight" not in names
    a_log = next(rule for rule in spec.tensors if rule.name == "layers.1.attention.A_log")
    assert a_log.source == "model.layers.1.self_attn.A_log" and a_log.shape == (1, 1, 12, 1)


def test_a_power_of_two_of_heads_leaves_no_padding_behind():
    config = wide_config()
    config["text_config"]["linear_attn_config"]["num_heads"] = 8
    assert not [rule for rule in read_model_spec(config).tensors if rule.unused]


SECTIONS = {
    "": {"new_trick": 1, "tie_word_embeddings": True},
    "text_config": {
        "new_trick": 1, "num_nextn_predict_layers": 1, "mla_use_nope": False, "topk_group": 2,
        "moe_router_activation_func": "softmax", "num_key_value_heads": 3, "hidden_act": "relu",
        "num_experts_per_token": 13, "moe_intermediate_size": 48, "q_lora_rank": 0,
        "model_type": "kimi_other", "attn_res_block_size": -1,
    },
    "vision_config": {
        "new_trick": 1, "merge_type": "other", "attn_bias": True, "qkv_hidden_size": 66,
        "text_hidden_size": 97, "projector_hidden_act": "silu", "merge_kernel_size": [2],
    },
    "text_config.linear_attn_config": {
        "new_trick": 1, "gate_lower_bound": 1.0, "kda_layers": [1, 2], "num_heads": "5",
    },
    "text_config.quantization_config": {
        "new_trick": 1, "quant_method": "fp8", "format": "nvfp4-pack-quantized",
        "kv_cache_scheme": {"num_bits": 8},
    },
    "text_config.quantization_config.config_groups.group_0.weights": {
        "new_trick": 1, "num_bits": 8, "group_size": 16, "symmetric": False, "dynamic": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [(s, field, value) for s, fields in SECTIONS.items() for field, value in fields.items()],
)
def test_what_is_not_computed_is_refused_by_name(section, field, value):
    config = copy.deepcopy(miniature_config())
    place = config
    for word in section.split(".") if section else ():
        place = place[word]
    place[field] = value
    named = {"kda_layers": "full_attn_layers"}.get(field, field)
    with pytest.raises(ConfigError, match=named):
        read_model_spec(config)


@pytest.mark.parametrize(
    "field", ["num_experts", "kv_lora_rank", "linear_attn_config", "max_position_embeddings"]
)
def test_a_missing_field_is_named(field):
    config = miniature_config()
    del config["text_config"][field]
    with pytest.raises(ConfigError, match=f"{field}' is missing"):
        read_model_spec(config)
