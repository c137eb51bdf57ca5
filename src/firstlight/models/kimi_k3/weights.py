"""The rule table of Kimi K3 and Kimi Linear: data only."""

from firstlight.sharding.rules import EXPERT, REPLICATED, PartName, Rule, RuleTable

_SOURCE = "{prefix}model.layers.{layer}"
_OURS = "layers.{layer}"
_HEADS = "kda_heads"


def _attention(
    source: str,
    shape: tuple[str | int, ...],
    axis: str = REPLICATED,
    *,
    name: str = "",
    when: str = "kda",
    dim: int = 0,
    dtype: str = "",
) -> Rule:
    return Rule(
        f"{_SOURCE}.self_attn.{source}",
        f"{_OURS}.attention.{name or source}",
        shape,
        axis,
        dim=dim,
        when=when,
        dtype=dtype,
    )


def _decay(part: int, name: str, dim: str, axis: str, *, unused: bool = False) -> Rule:
    """A_log of Kimi K3: one value a head, then zeros up to the next power of two."""
    return Rule(
        f"{_SOURCE}.self_attn.A_log",
        f"{_OURS}.attention.{name}",
        (dim,),
        axis,
        when="kda padded_decay" if unused else "kda bounded_decay",
        fused=(_HEADS, "kda_head_padding"),
        piece=part,
        dtype="F32",
        unused=unused,
    )


def _kda() -> tuple[Rule, ...]:
    return (
        *(_attention(f"{x}_proj.weight", ("kda_rows", "hidden"), _HEADS) for x in "qkv"),
        *(
            _attention(
                f"{x}_conv1d.weight",
                ("kda_rows", 1, "kda_taps"),
                _HEADS,
                name=f"{x}_conv.weight",
                dtype="F32",
            )
            for x in "qkv"
        ),
        _attention("f_a_proj.weight", ("kda_dim", "hidden")),
        _attention("f_b_proj.weight", ("kda_rows", "kda_dim"), _HEADS),
        _attention("dt_bias", ("kda_rows",), _HEADS, dtype="F32"),
        _decay(0, "A_log", _HEADS, _HEADS),
        _decay(1, "A_log_padding", "kda_head_padding", REPLICATED, unused=True),
        _attention(
            "A_log", (1, 1, _HEADS, 1), _HEADS, dim=2, when="kda softplus_decay", dtype="F32"
        ),
        _attention("b_proj.weight", (_HEADS, "hidden"), _HEADS),
        _attention("g_proj.weight", ("kda_rows", "hidden"), _HEADS, when="kda full_rank_gate"),
        _attention("g_a_proj.weight", ("kda_dim", "hidden"), when="kda low_rank_gate"),
        _attention("g_b_proj.weight", ("kda_rows", "kda_dim"), _HEADS, when="kda low_rank_gate"),
        _attention("o_norm.weight", ("kda_dim",), dtype="F32"),
        _attention("o_proj.weight", ("hidden", "kda_rows"), _HEADS, dim=1),
    )


def _mla() -> tuple[Rule, ...]:
    return (
        _attention("q_proj.weight", ("q_rows", "hidden"), "heads", when="mla q_whole"),
        _attention("q_a_proj.weight", ("q_rank", "hidden"), when="mla q_latent"),
        _attention(
            "q_a_layernorm.weight", ("q_rank",), name="q_a_norm.weight", when="mla q_latent"
        ),
        _attention("q_b_proj.weight", ("q_rows", "q_rank"), "heads", when="mla q_latent"),
        _attention(
            "kv_a_proj_with_mqa.weight",
            ("kv_latent", "hidden"),
            name="kv_a_proj.weight",
            when="mla",
        ),
        _attention("kv_a_layernorm.weight", ("kv_rank",), name="kv_a_norm.weight", when="mla"),
        _attention("kv_b_proj.weight", ("kv_rows", "kv_rank"), "heads", when="mla"),
        _attention("g_proj.weight", ("value_rows", "hidden"), "heads", when="mla output_gate"),
        _attention("o_proj.weight", ("hidden", "value_rows"), "heads", when="mla", dim=1),
    )


def _gated(source: str, ours: str, width: str, axis: str, when: str) -> tuple[Rule, ...]:
    source, ours = f"{_SOURCE}.{source}", f"{_OURS}.{ours}"
    shape, down = (width, "hidden"), ("hidden", width)
    return (
        Rule(f"{source}.gate_proj.weight", f"{ours}.gate_proj.weight", shape, axis, when=when),
        Rule(f"{source}.up_proj.weight", f"{ours}.up_proj.weight", shape, axis, when=when),
        Rule(
            f"{source}.down_proj.weight", f"{ours}.down_proj.weight", down, axis, dim=1, when=when
        ),
    )


def _moe(source: str, name: str, shape: tuple[str, ...], when: str = "", dtype: str = "") -> Rule:
    return Rule(
        f"{_SOURCE}.block_sparse_moe.{source}",
        f"{_OURS}.moe.{name}",
        shape,
        when=f"moe {when}",
        dtype=dtype,
    )


def _expert(letter: str, kind: str, shape: tuple[str, str], dim: int) -> Rule:
    """One matrix of every expert; `kind` is packed, scale, or empty for unquantised ones."""
    source = f"{_SOURCE}.block_sparse_moe.experts.{{expert}}.{letter}.weight"
    name = f"{_OURS}.moe.routed.experts.{letter}"
    if not kind:
        return Rule(source, name, shape, EXPERT, dim=dim, when="moe dense_experts")
    source, name = f"{source}_{kind}", f"{name}_{kind}"
    return Rule(
        source,
        name,
        shape,
        EXPERT,
        dim=dim,
        when="moe mxfp4_experts",
        dtype="U8",
        values=2 if kind == "packed" else 0,
    )


def _experts() -> tuple[Rule, ...]:
    return (
        _expert("w1", "packed", ("expert_width", "latent_packed"), 0),
        _expert("w1", "scale", ("expert_width", "latent_groups"), 0),
        _expert("w2", "packed", ("latent", "expert_width_packed"), 1),
        _expert("w2", "scale", ("latent", "expert_width_groups"), 1),
        _expert("w3", "packed", ("expert_width", "latent_packed"), 0),
        _expert("w3", "scale", ("expert_width", "latent_groups"), 0),
        _expert("w1", "", ("expert_width", "latent"), 0),
        _expert("w2", "", ("latent", "expert_width"), 1),
        _expert("w3", "", ("expert_width", "latent"), 0),
    )


def _mix(source: str, ours: str) -> tuple[Rule, Rule]:
    when = "mixed_residuals"
    return (
        Rule(f"{source}_norm.weight", f"{ours}.norm", ("hidden",), when=when),
        Rule(f"{source}_proj.weight", f"{ours}.query", (1, "hidden"), when=when),
    )


def _vision(source: str, name: str, shape: tuple[str, ...]) -> Rule:
    return Rule(f"vision_tower.{source}", f"vision.{name}", shape, when="vision")


def _block(source: str, name: str, shape: tuple[str, ...]) -> Rule:
    return _vision(f"encoder.blocks.{{block}}.{source}", f"blocks.{{block}}.{name}", shape)


def _projector(source: str, name: str, shape: tuple[str, ...]) -> Rule:
    return Rule(f"mm_projector.{source}", f"projector.{name}", shape, when="vision")


RULES = RuleTable(
    family="kimi_k3",
    version=1,
    rules=(
        Rule(
            "{prefix}model.embed_tokens.weight", "embed.weight", ("vocab", "hidden"), "vocabulary"
        ),
        Rule(f"{_SOURCE}.input_layernorm.weight", f"{_OURS}.attention_norm.weight", ("hidden",)),
        Rule(f"{_SOURCE}.post_attention_layernorm.weight", f"{_OURS}.mlp_norm.weight", ("hidden",)),
        *_mix(f"{_SOURCE}.self_attention_res", f"{_OURS}.attention_mix"),
        *_mix(f"{_SOURCE}.mlp_res", f"{_OURS}.mlp_mix"),
        *_kda(),
        *_mla(),
        *_gated("mlp", "mlp", "ffn", "width", "dense"),
        _moe("gate.weight", "routed.router.weight", ("experts", "hidden")),
        _moe("gate.e_score_correction_bias", "routed.router.bias", ("experts",), dtype="F32"),
        _moe(
            "routed_expert_down_proj.weight",
            "routed.down_proj.weight",
            ("latent", "hidden"),
            "latent",
        ),
        *_experts(),
        _moe("routed_expert_norm.weight", "norm.weight", ("latent",), "latent_norm"),
        _moe("routed_expert_up_proj.weight", "up_proj.weight", ("hidden", "latent"), "latent"),
        *_gated(
            "block_sparse_moe.shared_experts",
            "moe.shared",
            "shared_ffn",
            "shared_width",
            "moe shared",
        ),
        *_mix("{prefix}model.output_attn_res", "head.mix"),
        Rule("{prefix}model.norm.weight", "head.norm.weight", ("hidden",)),
        Rule("{prefix}lm_head.weight", "head.lm_head.weight", ("vocab", "hidden"), "vocabulary"),
        _vision(
            "patch_embed.proj.weight",
            "patch_embed.weight",
            ("vision_hidden", "vision_channels", "vision_patch", "vision_patch"),
        ),
        _vision(
            "patch_embed.pos_emb.weight",
            "positions",
            ("vision_rows", "vision_columns", "vision_hidden"),
        ),
        _block("norm0.weight", "norm0.weight", ("vision_hidden",)),
        _block("wqkv.weight", "wqkv.weight", ("vision_qkv", "vision_hidden")),
        _block("wo.weight", "wo.weight", ("vision_hidden", "vision_attention")),
        _block("norm1.weight", "norm1.weight", ("vision_hidden",)),
        _block("mlp.fc0.weight", "fc0.weight", ("vision_ffn", "vision_hidden")),
        _block("mlp.fc1.weight", "fc1.weight", ("vision_hidden", "vision_ffn")),
        _vision("encoder.final_layernorm.weight", "final_norm.weight", ("vision_hidden",)),
        _projector("proj.0.weight", "fc0.weight", ("vision_merged", "vision_merged")),
        _projector("proj.2.weight", "fc1.weight", ("hidden", "vision_merged")),
        _projector("post_norm.weight", "norm.weight", ("hidden",)),
    ),
    sums=(
        "layers.*.attention",
        "layers.*.mlp",
        "layers.*.moe.routed",
        "layers.*.moe.shared",
    ),
    parts=(
        PartName("layers.*.attention.*", "KDA attention", "kda"),
        PartName("layers.*.attention.*", "MLA attention", "mla"),
        PartName("*_mix.*", "attention residuals"),
        PartName("head.mix.*", "attention residuals"),
        PartName("layers.*.mlp.*", "dense feed-forward"),
        PartName("layers.*.moe.routed.experts.*", "routed experts"),
        PartName("layers.*.moe.routed.router.*", "routers"),
        PartName("layers.*.moe.shared.*", "shared experts"),
        PartName("layers.*.moe.*", "latent projections"),
    ),
)
