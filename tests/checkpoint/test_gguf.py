"""GGUF files read as their Hugging Face originals: names, rotary order, values, config."""

from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firstlight.checkpoint.gguf import source_name, unpermute
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.names import require_match
from firstlight.checkpoint.read_plan import parameter_shapes
from firstlight.checkpoint.reader import open_checkpoint
from firstlight.errors import ConfigError, TensorError
from firstlight.models.spec import read_model_spec
from firstlight.sharding.layout import Layout
from tiny_checkpoints import random_tensors, tiny_config

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def rotary_pairs(values, heads):
    """llama.cpp's order: the halves of each head interleaved."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, config, tensors, *, kind=Type.F32, architecture=None, **extra):
    architecture = architecture or config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(extra.pop("block_count", config["num_hidden_layers"]))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(12345.0)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, value in extra.items():
        writer.add_key_value(f"{architecture}.{key.replace('__', '.')}", value, *_kind(value))
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if architecture in ("llama", "smollm3") and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = rotary_pairs(values, config[key])
        own = kind if values.ndim > 1 else Type.F32
        data = values if own == Type.F32 else gguf.quants.quantize(values, own)
        writer.add_tensor(gguf_name(name), data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(value):
    types = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32}
    return (types.get(type(value), gguf.GGUFValueType.UINT32),)


def made(tmp_path, family="llama", **options):
    config = tiny_config(family, hidden_size=64, intermediate_size=128)
    tensors = random_tensors(read_model_spec(config))
    return config, tensors, write_gguf(tmp_path / "m.gguf", config, tensors, **options)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "smollm3"])
def test_a_file_reads_as_its_original(tmp_path, family):
    config, tensors, path = made(tmp_path, family)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        assert np.array_equal(checkpoint.read(name), expected.numpy()), name
    found = read_model_spec(checkpoint.config())
    wanted = read_model_spec({**config, "rope_theta": 12345.0})
    assert found.facts == wanted.facts
    assert found.tensors == wanted.tensors
    assert found.config.rope == wanted.config.rope
    assert found.config.uses_rope == wanted.config.uses_rope
    assert found.config.windows == wanted.config.windows
    require_match(checkpoint, found)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1])
def test_stored_types_load_as_the_library_dequantises_them(tmp_path, kind):
    _, tensors, path = made(tmp_path, kind=kind)
    checkpoint = open_checkpoint(path)
    spec = read_model_spec(checkpoint.config())
    for rank in range(2):
        place = Layout(tp=2).place(rank)
        parameters = {n: torch.empty(s) for n, s in parameter_shapes(spec, place).items()}
        load_into(parameters, checkpoint, spec, place)
        expected = gguf.quants.quantize(
            tensors["model.layers.1.self_attn.q_proj.weight"].numpy(), kind
        )
        expected = gguf.quants.dequantize(expected, kind)[rank * 32 : rank * 32 + 32]
        found = parameters["layers.1.attention.q_proj.weight"].numpy()
        assert np.array_equal(found, expected.astype(np.float32))


def test_the_stored_type_is_reported(tmp_path):
    info = open_checkpoint(made(tmp_path, kind=Type.Q8_0)[2]).tensors
    assert info["lm_head.weight"].stored == "Q8_0"
    assert info["lm_head.weight"].dtype == "F32"
    assert info["model.norm.weight"].stored == "F32"


@given(heads=st.integers(1, 5), half=st.integers(1, 4), width=st.integers(1, 3))
def test_undoing_the_rotary_order_gives_the_original(heads, half, width):
    values = np.arange(heads * 2 * half * width).reshape(-1, width)
    assert np.array_equal(unpermute(rotary_pairs(values, heads), heads), values)


@given(st.integers(0, 64), st.integers(0, 64))
@settings(max_examples=30, deadline=None)
def test_any_run_of_rows_is_that_run(tmp_path_factory, first, last):
    _, tensors, path = made(tmp_path_factory.mktemp("rows"))
    name = "model.layers.0.self_attn.q_proj.weight"
    start, stop = sorted((first, last))
    rows = open_checkpoint(path).read(name, slice(start, stop))
    assert np.array_equal(rows, tensors[name][start:stop].numpy())


@pytest.mark.parametrize("cut", [1, 4000, 60_000])
def test_a_truncated_file_names_what_is_short(tmp_path, cut):
    _, _, path = made(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    with pytest.raises(TensorError, match=r"m\.gguf, .*truncated"):
        open_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all, but long enough"])
def test_what_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(TensorError, match=r"m\.gguf"):
        open_checkpoint(path)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 600), value=st.integers(0, 255))
@example(at=23, value=255)  # 2^63 fields: the library alone would count them one by one
@example(at=15, value=255)
def test_a_damaged_header_never_escapes_as_another_error(tmp_path_factory, at, value):
    _, _, path = made(tmp_path_factory.mktemp("damage"))
    raw = bytearray(path.read_bytes())
    raw[at] = value
    path.write_bytes(raw)
    with suppress(TensorError, ConfigError):
        read_model_spec(open_checkpoint(path).config())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not known"),
        ({"expert_count": 8}, "mixtures of experts"),
        ({"block_count": 3_000_000_000}, "block_count is 3000000000, the tensors are of 2 layers"),
        ({"rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
        ({"attention__value_length": 3}, "different length"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(made(tmp_path, **options)[2]).config()


def test_linear_scaling_is_carried_over(tmp_path):
    options = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    rope = open_checkpoint(made(tmp_path, **options)[2]).config()["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 12345.0, "factor": 4.0}


def test_unknown_tensors_keep_their_name():
    assert source_name("rope_freqs.weight") == "rope_freqs.weight"
    assert source_name("blk.0.ssm_a.weight") == "blk.0.ssm_a.weight"


def llama3_factors(original, dims=32, theta=500_000.0, factor=8.0):
    """The published form, by wavelength."""
    wave = 2 * np.pi * theta ** (np.arange(0, dims, 2) / dims)
    smooth = (original / wave - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wave < original / 4, 1, np.where(wave > original, factor, middle))


def with_factors(tmp_path, factors):
    config = tiny_config(hidden_size=128)
    tensors = random_tensors(read_model_spec(config))
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("context_length", 64), ("embedding_length", 128), ("block_count", 0)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 48)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500_000.0)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"].numpy())
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


def test_llama3_scaling_is_derived_from_its_factors_and_proven(tmp_path):
    rope = with_factors(tmp_path, llama3_factors(8192)).config()["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["low_freq_factor"]) == ("llama3", 8.0, 1.0)


def test_factors_of_another_scaling_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no Llama 3 scaling"):
        with_factors(tmp_path, llama3_factors(4096)).config()


@pytest.mark.slow
def test_the_real_model_equals_what_transformers_loads(smollm2_gguf):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )  # fmt: skip
    checkpoint = open_checkpoint(smollm2_gguf)
    expected = model.state_dict()
    assert set(expected) - {"lm_head.weight"} == set(checkpoint.tensors)
    for name in checkpoint.tensors:
        assert np.array_equal(checkpoint.read(name), expected[name].numpy()), name
    require_match(checkpoint, read_model_spec(checkpoint.config()))
