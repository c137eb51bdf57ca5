"""Owns how GGUF metadata becomes the fields of a Hugging Face config; reads no file.

Only what the file states is written; a value it cannot carry is derived and proven, or refused.
"""

from collections.abc import Callable, Mapping
from math import isclose, pi
from typing import Any

from firstlight.checkpoint.tensor_info import Array, TensorInfo
from firstlight.errors import ConfigError

# GGUF architecture and the model_type that computes the same. Mistral is written as `llama`.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3"}
PERMUTED = ("llama", "smollm3")

_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
}


def config_from_metadata(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    *,
    rope_factors: Array | None = None,
) -> dict[str, Any]:
    """Returns config.json fields. `rope_factors` is the tensor of Llama 3 rotary factors, if any.

    Raises ConfigError for an architecture, a field or a rotary scaling that cannot be expressed.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"GGUF architecture {architecture!r} is not known; known: {known}")
    field = _FieldReader(metadata, architecture)
    if field("expert_count", 0):
        raise ConfigError(f"GGUF: mixtures of experts of architecture {architecture} are not read")
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    if field("attention.value_length", head_dim) != head_dim:
        raise ConfigError("GGUF: keys and values of different length are not supported")
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    if field("block_count") != len(layers):  # a damaged count would expand to billions of names
        raise ConfigError(
            f"GGUF: block_count is {field('block_count')}, the tensors are of {len(layers)} layers"
        )
    if "model.embed_tokens.weight" not in tensors:
        raise ConfigError("GGUF: the file has no token_embd.weight")
    fields: dict[str, Any] = {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": tensors["model.embed_tokens.weight"].rows,
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_parameters": _rope(field, head_dim, rope_factors),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    if architecture == "llama":
        fields["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in tensors
        fields["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in tensors
    else:
        fields["sliding_window"] = field("attention.sliding_window", 0) or None
    rotary = field("rope.dimension_count", head_dim)
    if rotary != head_dim:
        fields["partial_rotary_factor"] = rotary / head_dim
    fields.update({ours: metadata[key] for ours, key in _TOKENS.items() if key in metadata})
    return fields


class _FieldReader:
    """Takes fields of one architecture by their short name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._prefix = metadata, architecture

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if value is None:
            raise ConfigError(f"GGUF: metadata field {self._prefix}.{name} is missing")
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # some writers repeat one number for every layer
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(f"GGUF: {self._prefix}.{name} = {value!r} is not supported")
        return value


def _rope(field: Callable[..., Any], head_dim: int, factors: Array | None) -> dict[str, Any]:
    theta = field("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaling = field("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        rope.update(rope_type=scaling, factor=field("rope.scaling.factor"))
        original = field("rope.scaling.original_context_length", 0)
        if original:
            rope["original_max_position_embeddings"] = original
    elif scaling != "none":
        raise ConfigError(f"GGUF: rope scaling {scaling!r} is not supported; known: linear, yarn")
    if factors is not None and float(factors.max()) != 1.0:
        rope.update(_llama3_scaling(factors, theta, head_dim))
    return rope


def _llama3_scaling(factors: Array, theta: float, head_dim: int) -> dict[str, Any]:
    """Finds the Llama 3 scaling whose factors are those of the file; the file lacks its parameters.

    Raises ConfigError when the published parameters (8192 positions, 1 and 4) do not give them.
    """
    factor, original, low, high = float(factors.max()), 8192, 1.0, 4.0
    for index, found in enumerate(factors.tolist()):
        turns = original / (2 * pi * theta ** (2 * index / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        if not isclose(1 / ((1 - smooth) / factor + smooth), found, rel_tol=1e-4):
            raise ConfigError(
                f"GGUF: rope_freqs.weight[{index}] = {found} is no Llama 3 scaling over 8192 "
                "positions; use the safetensors checkpoint"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
