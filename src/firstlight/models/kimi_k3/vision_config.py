"""Owns the reading of Kimi K3's vision section: the tower and the projector; knows no pixel."""

from dataclasses import dataclass

from firstlight.models.config_reader import BOOKKEEPING, ConfigReader

# The reference gives the tower's norms no epsilon: torch's default, that of fp32.
_TOWER_EPSILON = 1.1920928955078125e-07


@dataclass(frozen=True)
class VisionConfig:
    """A vision transformer over patches, and the projector into the text width.

    Patches are `patch` pixels square; `merge` (rows, columns) of them become one feature. The table
    of learned positions is `table_height` x `table_width`; frames up to `table_time` get a fixed
    code. `attention_width` is heads x head_dim. `epsilon` is of the tower's norms.
    """

    patch: int
    merge: tuple[int, int]
    hidden_size: int
    blocks: int
    heads: int
    attention_width: int
    intermediate_size: int
    table_height: int
    table_width: int
    table_time: int
    projector_size: int
    projector_epsilon: float
    epsilon: float = _TOWER_EPSILON
    rope_base: float = 10_000.0
    channels: int = 3

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.attention_width // self.heads

    @property
    def merged_size(self) -> int:
        """Width of one merged feature, which enters the projector."""
        return self.hidden_size * self.merge[0] * self.merge[1]

    def dims(self) -> dict[str, int]:
        """Returns the dims the rule table speaks of."""
        return {
            "vision_hidden": self.hidden_size,
            "vision_channels": self.channels,
            "vision_patch": self.patch,
            "vision_rows": self.table_height,
            "vision_columns": self.table_width,
            "vision_attention": self.attention_width,
            "vision_qkv": 3 * self.attention_width,
            "vision_ffn": self.intermediate_size,
            "vision_merged": self.merged_size,
        }


def read_vision(reader: ConfigReader, text_hidden: int) -> VisionConfig:
    """Returns the vision section's record. Raises ConfigError naming what is not computed here."""
    reader.ignore(BOOKKEEPING)
    _refuse_variants(reader)
    hidden, heads = reader.positive("vt_hidden_size"), reader.positive("vt_num_attention_heads")
    width = reader.positive("qkv_hidden_size")
    if width % (4 * heads):
        raise reader.refuse("qkv_hidden_size", f"must be {heads} heads of a multiple of 4")
    merge = reader.take("merge_kernel_size", list)
    if len(merge) != 2 or not all(type(n) is int and n > 0 for n in merge):
        raise reader.refuse("merge_kernel_size", "must be two counts of patches")
    reader.must_equal("mm_hidden_size", (hidden,), hidden)
    config = VisionConfig(
        patch=reader.positive("patch_size"),
        merge=(merge[0], merge[1]),
        hidden_size=hidden,
        blocks=reader.positive("vt_num_hidden_layers"),
        heads=heads,
        attention_width=width,
        intermediate_size=reader.positive("vt_intermediate_size"),
        table_height=reader.positive("init_pos_emb_height"),
        table_width=reader.positive("init_pos_emb_width"),
        table_time=reader.positive("init_pos_emb_time"),
        projector_size=reader.must_equal("text_hidden_size", (text_hidden,), text_hidden),
        projector_epsilon=reader.take("projector_ln_eps", float),
    )
    reader.finish()
    return config


def _refuse_variants(reader: ConfigReader) -> None:
    reader.must_equal("activation_func", ("gelu_pytorch_tanh",), None)
    reader.must_equal("projector_hidden_act", ("gelu",), None)
    reader.must_equal("norm_type", ("rmsnorm",), None)
    reader.must_equal("mlp_type", ("mlp2",), None)
    reader.must_equal("merge_type", ("sd2_tpool",), None)
    reader.must_equal("mm_projector_type", ("patchmergerv2",), None)
    reader.must_equal("pos_emb_type", ("divided_fixed",), None)
    reader.must_equal("pos_emb_interpolation_mode", ("bilinear",), None)
    for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        reader.must_equal(name, (False,), False)
