"""Owns the values a Kimi K3 model begins training with, from a seed and the rule table's names.

It knows no task. Beyond the usual random values the model begins with a rough way of copying from
its context: two heads of the first layer pass on what stood one and two tokens before, and the
first latent attention matches the one with the other, so that after `key=` it looks at tokens that
followed `key=` earlier. Everything is trained from there.

Shape letters: D model width, H head width, C latent width, N heads, V value width, W taps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.models.kimi_k3.config import KimiConfig
from firstlight.models.spec import ModelSpec

_OUTWARD = ("o_proj.weight", "down_proj.weight", "w2", "moe.up_proj.weight", "wo.weight")
_OUTWARD_SCALE = 0.25
_DECAY_LOGITS = (-8.0, -2.0)  # half-lives from about 400 tokens to one
_CONVOLUTION_NOISE = 0.1
_FORGETFUL = 4.0  # decay logit of heads that keep nothing but the present token
_SHIFT_GAIN = 4.0
_VALUE_GAIN = 12.0
_MATCH = 40.0  # score of a latent with its like, before the softmax


def initial_values(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Returns fp32 values of every parameter, whole (of all ranks), local experts stacked."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in spec.tensors:
        if not rule.unused:
            stacked = (spec.facts.num_experts, *rule.shape) if rule.stacked else rule.shape
            shapes[rule.name] = stacked
    values = {name: _value(name, shape, generator) for name, shape in shapes.items()}
    if can_copy(spec.config):
        _pass_on_neighbours(values, spec.config)
        _match_neighbours(values, spec.config, generator)
    values["head.lm_head.weight"] = values["embed.weight"] * spec.config.hidden_size**-0.5
    return values


def can_copy(config: KimiConfig) -> bool:
    """Whether the sizes have room for the copying the model begins with."""
    mla, kda = config.mla, config.kda
    room = config.hidden_size - 2 * kda.head_dim
    return (
        not config.is_mla[0]
        and any(config.is_mla)
        and kda.heads >= 3
        and kda.taps >= 3
        and room >= kda.head_dim
        and mla.q_rank == mla.kv_rank
        and mla.kv_rank > room
        and mla.value_dim >= room
    )


def _value(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name:
        return torch.ones(shape)
    if leaf in ("bias", "A_log", "query"):
        return torch.zeros(shape)
    if leaf == "dt_bias":
        return torch.empty(shape).uniform_(*_DECAY_LOGITS, generator=generator)
    if "_conv" in name:
        return _shifts(shape, generator)
    normal = torch.randn(shape, generator=generator)
    if name == "embed.weight":
        return normal
    if name == "vision.positions":
        return normal * 0.1
    fan_in = shape[-1] if "patch_embed" not in name else shape[1] * shape[2] * shape[3]
    scale = _OUTWARD_SCALE if name.endswith(_OUTWARD) and "vision" not in name else 1.0
    scaled: Tensor = normal * (scale * fan_in**-0.5)
    return scaled


def _shifts(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each channel looks at one of the last inputs, chosen at random."""
    channels, _, taps = shape
    chosen_C = torch.randint(taps, (channels,), generator=generator)
    weight_CW = torch.randn(channels, taps, generator=generator) * _CONVOLUTION_NOISE
    weight_CW[torch.arange(channels), chosen_C] += 1.0
    return weight_CW.unsqueeze(1)


def _pass_on_neighbours(values: dict[str, Tensor], config: KimiConfig) -> None:
    """Heads 1 and 2 of the first layer write a code of the token 1 and 2 places back into the last
    2 H channels; embeddings begin in the other ones.
    """
    width, taps = config.kda.head_dim, config.kda.taps
    own = config.hidden_size - 2 * width
    embed_VD = values["embed.weight"]
    embed_VD[:, own:] *= 0.05
    embed_VD[:, :own] *= (config.hidden_size / own) ** 0.5
    prefix = "layers.0.attention"
    for head in (1, 2):
        rows = slice(head * width, (head + 1) * width)
        values[f"{prefix}.q_proj.weight"][rows] = values[f"{prefix}.k_proj.weight"][rows]
        values[f"{prefix}.q_conv.weight"][rows] = values[f"{prefix}.k_conv.weight"][rows]
        values[f"{prefix}.dt_bias"][rows] = _FORGETFUL
        values[f"{prefix}.v_proj.weight"][rows] = values[f"{prefix}.v_proj.weight"][:width]
        shift_W = torch.zeros(taps)
        shift_W[taps - 1 - head] = 1.0
        values[f"{prefix}.v_conv.weight"][rows] = shift_W
        place = own + (head - 1) * width
        out_DH = values[f"{prefix}.o_proj.weight"][:, rows]
        out_DH.zero_()
        out_DH[place : place + width] = _SHIFT_GAIN * torch.eye(width)


def _match_neighbours(
    values: dict[str, Tensor], config: KimiConfig, generator: torch.Generator
) -> None:
    """The first latent attention asks with the token before and is answered by tokens two after
    its like; what they are themselves is passed on.
    """
    mla, width = config.mla, config.kda.head_dim
    own = config.hidden_size - 2 * width
    assert mla.q_rank is not None
    prefix = f"layers.{config.is_mla.index(True)}.attention"
    spread = mla.kv_rank - own
    code_CH = torch.linalg.qr(torch.randn(max(spread, width), width, generator=generator))[0]
    code_CH = code_CH[:spread] * (spread / width) ** 0.5
    for name, begin in (("q_a_proj", own), ("kv_a_proj", own + width)):
        down_CD = values[f"{prefix}.{name}.weight"]
        down_CD[: mla.kv_rank] *= 0.1
        down_CD[own : mla.kv_rank, begin : begin + width] = code_CH
    values[f"{prefix}.kv_a_proj.weight"][:own, :own] += torch.eye(own)
    expansion = values[f"{prefix}.kv_b_proj.weight"].view(mla.heads, -1, mla.kv_rank)
    queries = values[f"{prefix}.q_b_proj.weight"].view(mla.heads, -1, mla.kv_rank)
    out = values[f"{prefix}.o_proj.weight"].view(config.hidden_size, mla.heads, -1)
    # Latents have unit mean square; the query's lies in the code's channels alone.
    alike = (spread * mla.kv_rank) ** 0.5 * mla.nope_dim / mla.qk_dim**0.5
    scale = (_MATCH / alike) ** 0.5
    for head in range(mla.heads):
        keys = torch.randn(mla.nope_dim, spread, generator=generator) * scale
        expansion[head, : mla.nope_dim, own:] = keys
        expansion[head, : mla.nope_dim, :own] *= 0.1
        queries[head, : mla.nope_dim, own:] = keys
        turn = torch.linalg.qr(torch.randn(mla.value_dim, own, generator=generator))[0]
        expansion[head, mla.nope_dim :, :own] = turn
        expansion[head, mla.nope_dim :, own:] *= 0.1
        out[:own, head] += _VALUE_GAIN / mla.heads * turn.t()


def num_values(values: Mapping[str, Tensor]) -> int:
    """Returns the number of parameters."""
    return sum(value.numel() for value in values.values())
