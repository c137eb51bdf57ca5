"""Owns the reading of Kimi K3 and Kimi Linear configs: every choice made, in one record.

Knows no tensor; what differs between the two ends in fields that are None or False.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firstlight.errors import ConfigError
from firstlight.models.config_reader import BOOKKEEPING, GENERATION_BOOKKEEPING, ConfigReader
from firstlight.models.kimi_k3.quantisation import is_quantised
from firstlight.models.kimi_k3.vision_config import VisionConfig, read_vision

MODEL_TYPES = ("kimi_k3", "kimi_linear")
SCALE_GROUP = 32
# The reference gives these norms the default of its norm class, not rms_norm_eps.
_LATENT_EPSILON = 1e-6


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention. `gate_lower_bound` None is the softplus form of the decay; the output
    gate is one matrix when `full_rank_gate`, else two of inner width `head_dim`.
    """

    heads: int
    head_dim: int
    taps: int
    gate_lower_bound: float | None
    full_rank_gate: bool

    @property
    def rows(self) -> int:
        """Channels of q, of k and of v."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Latent attention without rotation. `q_rank` None: queries come from one matrix.

    A query or key head is `nope_dim` wide plus `shared_dim`, of which the key part is shared by all
    heads. `epsilon` is that of the norms of the two latents.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    output_gate: bool
    epsilon: float = _LATENT_EPSILON

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head; scores are scaled by its inverse square root."""
        return self.nope_dim + self.shared_dim

    @property
    def cached_width(self) -> int:
        """Values kept per token: the latent and the shared part of the key."""
        return self.kv_rank + self.shared_dim


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts chosen by sigmoid scores plus a bias.

    `latent` None: experts work on the hidden width; else between two projections, with a norm on
    the weighted sum when `latent_norm`. `quantised`: expert matrices are MXFP4, 32 input values a
    scale. `shared_width` is that of all shared experts together.
    """

    experts: int
    top_k: int
    width: int
    latent: int | None
    latent_norm: bool
    shared_width: int
    renormalise: bool
    scaling: float
    quantised: bool


@dataclass(frozen=True)
class SituBetas:
    """SiTU gating: beta * tanh(g / beta) * sigmoid(g) times linear_beta * tanh(u / linear_beta)."""

    beta: float
    linear_beta: float


@dataclass(frozen=True)
class KimiConfig:
    """A decoder of KDA and MLA layers with dense or mixture feed-forwards, perhaps with images.

    `is_mla` and `is_moe` have one entry a layer. `situ` None: SiLU gating. `residual_block` None:
    plain residuals, else a snapshot of the running sum every so many layers. `media_token_id` is
    the id whose positions image features take, None for a text model.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    is_mla: tuple[bool, ...]
    is_moe: tuple[bool, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    norm_epsilon: float
    situ: SituBetas | None
    residual_block: int | None
    context_length: int
    vision: VisionConfig | None = None
    media_token_id: int | None = None
    image_placeholder: str = ""


def read_config(fields: Mapping[str, Any]) -> KimiConfig:
    """Returns the config of a Kimi K3 or Kimi Linear model.

    Raises ConfigError for missing, contradictory or unknown fields, each by name.
    """
    reader = ConfigReader(fields)
    if reader.must_equal("model_type", MODEL_TYPES, None) == "kimi_linear":
        return _read_text(reader)
    reader.ignore((*BOOKKEEPING, *GENERATION_BOOKKEEPING, "ignore_index"))
    reader.must_equal("tie_word_embeddings", (False,), False)
    text_reader = reader.section("text_config")
    text_reader.must_equal("model_type", ("kimi_linear",), None)
    media = {
        "media_token_id": reader.take("media_placeholder_token_id", int),
        "image_placeholder": reader.take("image_placeholder", str, ""),
    }
    vision_reader = reader.section("vision_config")
    reader.finish()
    config = _read_text(text_reader, media)
    return _with_vision(config, read_vision(vision_reader, config.hidden_size))


def _with_vision(config: KimiConfig, vision: VisionConfig) -> KimiConfig:
    if config.media_token_id is not None and not 0 <= config.media_token_id < config.vocab_size:
        raise ConfigError(
            f"config.json: media_placeholder_token_id {config.media_token_id} is outside the "
            f"vocabulary of {config.vocab_size}"
        )
    return KimiConfig(**{**vars(config), "vision": vision})


def _read_text(reader: ConfigReader, media: Mapping[str, Any] | None = None) -> KimiConfig:
    reader.ignore((*BOOKKEEPING, *GENERATION_BOOKKEEPING, "output_router_logits"))
    _refuse_variants(reader)
    num_layers = reader.positive("num_hidden_layers")
    kda, is_mla = _read_linear(reader.section("linear_attn_config"), num_layers)
    config = KimiConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        num_layers=num_layers,
        intermediate_size=reader.positive("intermediate_size"),
        is_mla=is_mla,
        is_moe=_moe_layers(reader, num_layers),
        kda=kda,
        mla=_read_mla(reader),
        moe=_read_moe(reader),
        norm_epsilon=reader.take("rms_norm_eps", float, 1e-5),
        situ=_read_situ(reader),
        residual_block=_optional(reader, "attn_res_block_size"),
        context_length=_context(reader),
        **(media or {}),
    )
    reader.finish()
    return config


def _refuse_variants(reader: ConfigReader) -> None:
    reader.must_equal("tie_word_embeddings", (False,), False)
    reader.must_equal("num_nextn_predict_layers", (0,), 0)
    reader.must_equal("attention_bias", (False,), False)
    reader.must_equal("pretraining_tp", (1,), 1)
    # Nothing is rotated, so how it would be says nothing.
    reader.must_equal("mla_use_nope", (True,), False)
    reader.ignore(("rope_theta", "rope_scaling", "rope_parameters", "head_dim"))


def _optional(reader: ConfigReader, name: str) -> int | None:
    return reader.positive(name) if reader.has(name) else reader.take(name, int, None)


def _context(reader: ConfigReader) -> int:
    length = _optional(reader, "model_max_length")
    return reader.positive("max_position_embeddings", *([length] if length else []))


def _read_situ(reader: ConfigReader) -> SituBetas | None:
    act = reader.must_equal("hidden_act", ("situ", "silu"), "silu")
    if act == "situ":
        beta = reader.take("activation_situ_beta", float)
        return SituBetas(beta, reader.take("activation_situ_linear_beta", float))
    reader.ignore(("activation_situ_beta", "activation_situ_linear_beta"))
    return None


def _read_linear(reader: ConfigReader, num_layers: int) -> tuple[KdaConfig, tuple[bool, ...]]:
    """Returns what KDA is and which layers are MLA; the config counts layers from 1."""
    kda_layers, mla_layers = reader.take("kda_layers", list), reader.take("full_attn_layers", list)
    if sorted(kda_layers + mla_layers) != list(range(1, num_layers + 1)):
        raise reader.refuse(
            "full_attn_layers", f"with kda_layers it must name each of 1..{num_layers} once"
        )
    bound = reader.take("gate_lower_bound", float, None)
    if bound is not None and bound >= 0:
        raise reader.refuse("gate_lower_bound", "must be below 0")
    kda = KdaConfig(
        heads=reader.positive("num_heads"),
        head_dim=reader.positive("head_dim"),
        taps=reader.positive("short_conv_kernel_size"),
        gate_lower_bound=bound,
        full_rank_gate=reader.take("use_full_rank_gate", bool, False),
    )
    reader.finish()
    return kda, tuple(layer in set(mla_layers) for layer in range(1, num_layers + 1))


def _moe_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    first = reader.take("first_k_dense_replace", int)
    every = reader.positive("moe_layer_freq", 1)
    return tuple(layer >= first and layer % every == 0 for layer in range(num_layers))


def _read_mla(reader: ConfigReader) -> MlaConfig:
    heads = reader.positive("num_attention_heads")
    reader.must_equal("num_key_value_heads", (heads,), heads)
    return MlaConfig(
        heads=heads,
        q_rank=_optional(reader, "q_lora_rank"),
        kv_rank=reader.positive("kv_lora_rank"),
        nope_dim=reader.positive("qk_nope_head_dim"),
        shared_dim=reader.positive("qk_rope_head_dim"),
        value_dim=reader.positive("v_head_dim"),
        output_gate=reader.take("mla_use_output_gate", bool, False),
    )


def _read_moe(reader: ConfigReader) -> MoeConfig:
    reader.must_equal("moe_router_activation_func", ("sigmoid",), "sigmoid")
    reader.must_equal("topk_method", ("noaux_tc",), "noaux_tc")
    reader.must_equal("num_expert_group", (1,), 1)
    reader.must_equal("topk_group", (1,), 1)
    reader.ignore(("use_grouped_topk",))  # one group of all experts is no grouping
    experts, top_k = reader.positive("num_experts"), reader.positive("num_experts_per_token")
    if top_k > experts:
        raise reader.refuse("num_experts_per_token", f"more than the {experts} experts")
    width = reader.positive("moe_intermediate_size")
    latent = _optional(reader, "routed_expert_hidden_size")
    quantised = is_quantised(reader)
    for name, size in (("moe_intermediate_size", width), ("routed_expert_hidden_size", latent)):
        if quantised and size is not None and size % SCALE_GROUP:
            raise reader.refuse(name, f"not a multiple of {SCALE_GROUP}, the group of one scale")
    return MoeConfig(
        experts=experts,
        top_k=top_k,
        width=width,
        latent=latent,
        latent_norm=reader.take("latent_moe_use_norm", bool, False) and latent is not None,
        shared_width=reader.take("num_shared_experts", int, 0) * width,
        renormalise=reader.take("moe_renormalize", bool, True),
        scaling=reader.take("routed_scaling_factor", float, 1.0),
        quantised=quantised,
    )
