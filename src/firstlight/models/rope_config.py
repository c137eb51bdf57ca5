"""Owns how Hugging Face configs write rotary embeddings, old form and new; knows no tensor.

Older files have a top-level `rope_theta` and `rope_scaling`, transformers 5 writes
`rope_parameters`.
"""

from math import log
from typing import Any

from firstlight.errors import ConfigError
from firstlight.layers.rope_spec import RopeSpec
from firstlight.models.config_reader import ConfigReader

SUPPORTED = ("default", "linear", "llama3", "yarn")


def read_rope(reader: ConfigReader, *, head_dim: int, default_theta: float) -> RopeSpec:
    """Returns the rotary embedding a config asks for.

    Raises ConfigError for scaling forms that are not computed here (dynamic NTK rescales keys that
    are already cached, so its result depends on the order of requests).
    """
    old_theta = reader.take("rope_theta", float, default_theta)
    scaling: dict[str, Any] = reader.take("rope_scaling", dict, {})
    fields: dict[str, Any] = {**scaling, **reader.take("rope_parameters", dict, {})}
    max_positions = reader.positive("max_position_embeddings")
    nested = ConfigReader(fields, "config.json, rope_parameters")
    form = nested.take("rope_type", str, nested.take("type", str, "default"))
    if form not in SUPPORTED:
        raise ConfigError(
            f"config.json: rope type {form!r} is not supported; known: {', '.join(SUPPORTED)}"
        )
    partial = nested.take("partial_rotary_factor", float, 1.0)
    spec = RopeSpec(
        rotary_dim=int(head_dim * reader.take("partial_rotary_factor", float, partial)),
        theta=nested.take("rope_theta", float, old_theta),
        max_positions=max_positions,
        scaling=form,
        factor=nested.take("factor", float, 1.0),
        original_positions=nested.take("original_max_position_embeddings", int, max_positions),
        low_freq_factor=nested.take("low_freq_factor", float, 1.0),
        high_freq_factor=nested.take("high_freq_factor", float, 4.0),
        beta_fast=nested.take("beta_fast", float, 32.0),
        beta_slow=nested.take("beta_slow", float, 1.0),
        attention_factor=_attention_factor(nested, form),
        truncate=nested.take("truncate", bool, True),
    )
    nested.finish()
    return spec


def _attention_factor(nested: ConfigReader, form: str) -> float:
    """YaRN's scale of cosine and sine (arXiv:2309.00071, section 3.4): 0.1 ln(factor) + 1, or the
    ratio of the two declared mscales."""
    given = nested.take("attention_factor", float, 0.0)
    mscale = nested.take("mscale", float, 0.0)
    mscale_all = nested.take("mscale_all_dim", float, 0.0)
    if form != "yarn":
        return 1.0
    if given:
        return given
    factor = nested.take("factor", float, 1.0)
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0
