"""Owns the reading of Llama-like dense configs: Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM2/3.

Differences between those families end here: the model sees one record with every choice made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.errors import ConfigError
from firstlight.layers.rope_spec import RopeSpec
from firstlight.models.config_reader import BOOKKEEPING, ConfigReader
from firstlight.models.rope_config import read_rope
from firstlight.sharding.published_codecs import FIELD, published_codec
from firstlight.sharding.rules import Axis, Facts, vocabulary_axis, width_axis
from firstlight.sharding.state_spec import GroupedQueryState


@dataclass(frozen=True)
class LlamaConfig:
    """A dense decoder with grouped-query attention. `uses_rope` and `windows` have one entry a
    layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    uses_rope: tuple[bool, ...]
    windows: tuple[int | None, ...]
    context_length: int


# What each family does when its config is silent.
_THETA = {"smollm3": 2_000_000.0}
_TIED = {"smollm3": True}
_HEAD_DIM = {"qwen3": 128}


def read_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """Returns the config of a Llama-like model.

    Raises ConfigError for missing, contradictory or unknown fields, each by name.
    """
    reader = ConfigReader(fields)
    family = reader.must_equal("model_type", MODEL_TYPES, None)
    reader.ignore(BOOKKEEPING)
    _refuse_variants(reader)
    hidden, heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    kv_heads = reader.positive("num_key_value_heads", heads)
    head_dim = reader.positive("head_dim", _HEAD_DIM.get(family, hidden // heads))
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    num_layers = reader.positive("num_hidden_layers")
    rope = read_rope(reader, head_dim=head_dim, default_theta=_THETA.get(family, 10_000.0))
    uses_rope = _rope_layers(reader, family, num_layers)
    attention_bias = reader.take("attention_bias", bool, False)
    config = LlamaConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=reader.take("rms_norm_eps", float, 1e-6),
        tied=reader.take("tie_word_embeddings", bool, _TIED.get(family, False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=reader.take("mlp_bias", bool, False),
        qk_norm=family == "qwen3",
        rope=rope,
        uses_rope=uses_rope,
        windows=_windows(reader, family, num_layers, uses_rope),
        context_length=rope.max_positions,
    )
    reader.finish()
    return config


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def _refuse_variants(reader: ConfigReader) -> None:
    reader.must_equal("hidden_act", ("silu",), "silu")
    reader.must_equal("pretraining_tp", (1, 2, 4, 8), 1)  # a training artefact, not a variant
    # Weights are dequantised when they are read; a way that is not known is refused by name.
    published_codec({FIELD: reader.take(FIELD, dict, None)})


def _rope_layers(reader: ConfigReader, family: str, num_layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * num_layers
    interval = reader.positive("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    given = reader.take("no_rope_layers", list, default)
    if len(given) != num_layers:
        raise ConfigError(
            f"config.json: no_rope_layers has {len(given)} entries for {num_layers} layers"
        )
    return tuple(bool(v) for v in given)


def _windows(
    reader: ConfigReader, family: str, num_layers: int, uses_rope: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """One window a layer, None for full attention, by each family's own convention."""
    if family == "llama":
        return (None,) * num_layers
    # An absent field is the family's default window, an explicit null is none (transformers 5).
    window = None if family == "smollm3" or reader.names("sliding_window") else 4096
    window = reader.take("sliding_window", int, window)
    if family == "mistral":
        return (window,) * num_layers
    on = reader.take("use_sliding_window", bool, False) and window is not None
    first = reader.take("max_window_layers", int, 28 if family in ("qwen2", "qwen3") else 0)
    if family == "smollm3":
        default = [on and not rope for rope in uses_rope]
    else:
        default = [on and layer >= first for layer in range(num_layers)]
    names = ["sliding_attention" if slide else "full_attention" for slide in default]
    given = reader.take("layer_types", list, names)
    if len(given) != num_layers or set(given) - {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"config.json: layer_types must hold {num_layers} entries of full_attention or "
            f"sliding_attention, got {given!r}"
        )
    if "sliding_attention" in given and window is None:
        raise ConfigError("config.json: layer_types asks for sliding_attention without a window")
    return tuple(window if kind == "sliding_attention" else None for kind in given)


def facts(config: LlamaConfig) -> Facts:
    """Returns the dims, axes and flags that this family's rule table speaks of."""
    flags = {
        "tied": config.tied,
        "untied": not config.tied,
        "qkv_bias": config.qkv_bias,
        "output_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
    }
    axes = (
        Axis("heads", config.num_heads),
        Axis("kv_heads", config.num_kv_heads, replicable=True),
        width_axis("width", config.intermediate_size),
        vocabulary_axis(config.vocab_size),
    )
    return Facts(
        num_layers=config.num_layers,
        dims={
            "vocab": config.vocab_size,
            "hidden": config.hidden_size,
            "ffn": config.intermediate_size,
            "head_dim": config.head_dim,
            "q_rows": config.num_heads * config.head_dim,
            "kv_rows": config.num_kv_heads * config.head_dim,
        },
        axes={axis.name: axis for axis in axes},
        flags=frozenset(name for name, on in flags.items() if on),
    )


def states(config: LlamaConfig) -> tuple[GroupedQueryState, ...]:
    """Returns what each layer keeps: keys and values per token."""
    return tuple(
        GroupedQueryState(config.num_kv_heads, config.head_dim, window) for window in config.windows
    )
