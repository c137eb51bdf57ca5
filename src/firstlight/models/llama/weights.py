"""The rule table of Llama-like dense models: data only."""

from firstlight.sharding.rules import ONCE, Ignored, Rule, RuleTable

_SOURCE = "model.layers.{layer}"
_OURS = "layers.{layer}"


def _attention(letter: str, rows: str, axis: str) -> tuple[Rule, Rule]:
    source, name = f"{_SOURCE}.self_attn.{letter}_proj", f"{_OURS}.attention.{letter}_proj"
    return (
        Rule(f"{source}.weight", f"{name}.weight", (rows, "hidden"), axis),
        Rule(f"{source}.bias", f"{name}.bias", (rows,), axis, when="qkv_bias"),
    )


def _mlp_in(kind: str) -> tuple[Rule, Rule]:
    source, name = f"{_SOURCE}.mlp.{kind}_proj", f"{_OURS}.mlp.{kind}_proj"
    return (
        Rule(f"{source}.weight", f"{name}.weight", ("ffn", "hidden"), "width"),
        Rule(f"{source}.bias", f"{name}.bias", ("ffn",), "width", when="mlp_bias"),
    )


RULES = RuleTable(
    family="llama",
    version=1,
    rules=(
        Rule("model.embed_tokens.weight", "embed.weight", ("vocab", "hidden"), "vocabulary"),
        Rule(f"{_SOURCE}.input_layernorm.weight", f"{_OURS}.attention_norm.weight", ("hidden",)),
        *_attention("q", "q_rows", "heads"),
        *_attention("k", "kv_rows", "kv_heads"),
        *_attention("v", "kv_rows", "kv_heads"),
        Rule(
            f"{_SOURCE}.self_attn.q_norm.weight",
            f"{_OURS}.attention.q_norm.weight",
            ("head_dim",),
            when="qk_norm",
        ),
        Rule(
            f"{_SOURCE}.self_attn.k_norm.weight",
            f"{_OURS}.attention.k_norm.weight",
            ("head_dim",),
            when="qk_norm",
        ),
        Rule(
            f"{_SOURCE}.self_attn.o_proj.weight",
            f"{_OURS}.attention.o_proj.weight",
            ("hidden", "q_rows"),
            "heads",
            dim=1,
        ),
        Rule(
            f"{_SOURCE}.self_attn.o_proj.bias",
            f"{_OURS}.attention.o_proj.bias",
            ("hidden",),
            ONCE,
            when="output_bias",
        ),
        Rule(f"{_SOURCE}.post_attention_layernorm.weight", f"{_OURS}.mlp_norm.weight", ("hidden",)),
        *_mlp_in("gate"),
        *_mlp_in("up"),
        Rule(
            f"{_SOURCE}.mlp.down_proj.weight",
            f"{_OURS}.mlp.down_proj.weight",
            ("hidden", "ffn"),
            "width",
            dim=1,
        ),
        Rule(
            f"{_SOURCE}.mlp.down_proj.bias",
            f"{_OURS}.mlp.down_proj.bias",
            ("hidden",),
            ONCE,
            when="mlp_bias",
        ),
        Rule("model.norm.weight", "head.norm.weight", ("hidden",)),
        Rule(
            "lm_head.weight",
            "head.lm_head.weight",
            ("vocab", "hidden"),
            "vocabulary",
            when="untied",
        ),
    ),
    sums=("layers.*.attention", "layers.*.mlp"),
    tied=(("head.lm_head.weight", "embed.weight"),),
    ignored=(
        Ignored("model.layers.*.self_attn.rotary_emb.inv_freq", "recomputed from the config"),
        Ignored("rope_freqs.weight", "recomputed from the config"),
        Ignored("lm_head.weight", "tied to the embedding", when="tied"),
    ),
)
