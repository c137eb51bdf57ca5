"""Owns rotary position tables: angles per position and channel pair, scaling forms included.

Formulas: RoPE arXiv:2104.09864; linear: positions divided by the factor; llama3: the piecewise form
published with Llama 3.1; YaRN arXiv:2309.00071.
"""

from math import ceil, floor, log, pi

import torch
from torch import Tensor, nn

from firstlight.layers.rope_spec import RopeSpec


class RotaryTable(nn.Module):
    """Cosines and sines [positions, rotary_dim / 2] in fp32, shared by all layers of a model.

    Buffers are not part of the state dict: they follow from the config. They are computed on the
    CPU even where the model is being built without storage.
    """

    cos_PR: Tensor
    sin_PR: Tensor

    def __init__(self, spec: RopeSpec, num_positions: int) -> None:
        super().__init__()
        frequencies_R = inverse_frequencies(spec)
        positions_P = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles_PR = positions_P[:, None] * frequencies_R[None, :]
        self.register_buffer("cos_PR", angles_PR.cos() * spec.attention_factor, persistent=False)
        self.register_buffer("sin_PR", angles_PR.sin() * spec.attention_factor, persistent=False)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Returns fp32 [rotary_dim / 2] on the CPU: radians per position of each channel pair."""
    half = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64, device="cpu").float()
    wave_R = spec.theta ** (half / spec.rotary_dim)
    if spec.scaling == "linear":
        return 1.0 / wave_R / spec.factor
    if spec.scaling == "llama3":
        return _llama3(1.0 / wave_R, spec)
    if spec.scaling == "yarn":
        return _yarn(wave_R, spec)
    return 1.0 / wave_R


def _llama3(frequencies_R: Tensor, spec: RopeSpec) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended linearly."""
    wavelengths_R = 2 * pi / frequencies_R
    longest = spec.original_positions / spec.low_freq_factor
    shortest = spec.original_positions / spec.high_freq_factor
    blend_R = (spec.original_positions / wavelengths_R - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    slowed_R = frequencies_R / spec.factor
    between_R = (1 - blend_R) * slowed_R + blend_R * frequencies_R
    out_R = torch.where(wavelengths_R > longest, slowed_R, frequencies_R)
    inside_R = (wavelengths_R >= shortest) & (wavelengths_R <= longest)
    return torch.where(inside_R, between_R, out_R)


def _yarn(wave_R: Tensor, spec: RopeSpec) -> Tensor:
    """Channels that turn often are kept, those that turn seldom interpolated, a ramp between."""
    low, high = _turns(spec.beta_fast, spec), _turns(spec.beta_slow, spec)
    if spec.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    high = high + 0.001 if high == low else high
    index_R = torch.arange(spec.rotary_dim // 2, dtype=torch.float32, device="cpu")
    keep_R = 1 - ((index_R - low) / (high - low)).clamp(0, 1)
    return (1.0 / (spec.factor * wave_R)) * (1 - keep_R) + (1.0 / wave_R) * keep_R


def _turns(rotations: float, spec: RopeSpec) -> float:
    """The channel pair that turns `rotations` times over the original context."""
    span = log(spec.original_positions / (rotations * 2 * pi))
    return spec.rotary_dim * span / (2 * log(spec.theta))
