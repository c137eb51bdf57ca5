"""Owns what a Kimi config means in the words of the rule table, and what each layer keeps."""

from firstlight.models.kimi_k3.config import SCALE_GROUP, KimiConfig
from firstlight.sharding.rules import EXPERT, Axis, Facts, vocabulary_axis, width_axis
from firstlight.sharding.state_spec import LatentState, RecurrentState, StateSpec


def facts(config: KimiConfig) -> Facts:
    """Returns the dims, axes, layer sets and flags that this family's rule table speaks of."""
    moe, vision = config.moe, config.vision
    layers = range(config.num_layers)
    return Facts(
        num_layers=config.num_layers,
        dims={**_text_dims(config), **_moe_dims(config), **(vision.dims() if vision else {})},
        axes={axis.name: axis for axis in _axes(config)},
        layer_sets={
            "kda": frozenset(n for n in layers if not config.is_mla[n]),
            "mla": frozenset(n for n in layers if config.is_mla[n]),
            "dense": frozenset(n for n in layers if not config.is_moe[n]),
            "moe": frozenset(n for n in layers if config.is_moe[n]),
        },
        flags=frozenset(name for name, on in _flags(config).items() if on),
        num_experts=moe.experts if any(config.is_moe) else 0,
        num_blocks=vision.blocks if vision else 0,
        source_prefix="language_model." if vision else "",
    )


def _axes(config: KimiConfig) -> tuple[Axis, ...]:
    moe = config.moe
    expert = (
        Axis(
            EXPERT,
            moe.width // SCALE_GROUP,
            piece=f"group of {SCALE_GROUP} columns that share a scale",
        )
        if moe.quantised
        else width_axis(EXPERT, moe.width)
    )
    return (
        Axis("kda_heads", config.kda.heads, piece="KDA head"),
        Axis("heads", config.mla.heads, piece="MLA head"),
        width_axis("width", config.intermediate_size),
        *((width_axis("shared_width", moe.shared_width),) if moe.shared_width else ()),
        expert,
        vocabulary_axis(config.vocab_size),
    )


def _flags(config: KimiConfig) -> dict[str, bool]:
    kda, mla, moe = config.kda, config.mla, config.moe
    bounded = kda.gate_lower_bound is not None
    return {
        "bounded_decay": bounded,
        "softplus_decay": not bounded,
        "padded_decay": bounded and _padded(kda.heads) > kda.heads,
        "full_rank_gate": kda.full_rank_gate,
        "low_rank_gate": not kda.full_rank_gate,
        "q_latent": mla.q_rank is not None,
        "q_whole": mla.q_rank is None,
        "output_gate": mla.output_gate,
        "mixed_residuals": config.residual_block is not None,
        "latent": moe.latent is not None,
        "latent_norm": moe.latent_norm,
        "shared": moe.shared_width > 0,
        "mxfp4_experts": moe.quantised,
        "dense_experts": not moe.quantised,
        "vision": config.vision is not None,
    }


def _padded(heads: int) -> int:
    """Returns the length of A_log in a Kimi K3 checkpoint: the next power of two."""
    return 1 << (heads - 1).bit_length()


def _text_dims(config: KimiConfig) -> dict[str, int]:
    kda, mla = config.kda, config.mla
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "kda_rows": kda.rows,
        "kda_dim": kda.head_dim,
        "kda_heads": kda.heads,
        "kda_head_padding": _padded(kda.heads) - kda.heads,
        "kda_taps": kda.taps,
        "q_rank": mla.q_rank or 0,
        "q_rows": mla.heads * mla.qk_dim,
        "kv_rank": mla.kv_rank,
        "kv_latent": mla.cached_width,
        "kv_rows": mla.heads * (mla.nope_dim + mla.value_dim),
        "value_rows": mla.heads * mla.value_dim,
    }


def _moe_dims(config: KimiConfig) -> dict[str, int]:
    moe = config.moe
    latent = moe.latent or config.hidden_size
    return {
        "experts": moe.experts,
        "expert_width": moe.width,
        "expert_width_packed": moe.width // 2,
        "expert_width_groups": moe.width // SCALE_GROUP,
        "latent": latent,
        "latent_packed": latent // 2,
        "latent_groups": latent // SCALE_GROUP,
        "shared_ffn": moe.shared_width,
    }


def states(config: KimiConfig) -> tuple[StateSpec, ...]:
    """Returns what each layer keeps: latents per token (MLA) or a state per sequence (KDA)."""
    kda = config.kda
    latent = LatentState(config.mla.cached_width)
    recurrent = RecurrentState(
        heads=kda.heads,
        key_dim=kda.head_dim,
        value_dim=kda.head_dim,
        conv_channels=3 * kda.rows,
        conv_taps=kda.taps - 1,
    )
    return tuple(latent if mla else recurrent for mla in config.is_mla)
