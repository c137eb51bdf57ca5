"""Owns the numbers that define a rotary position embedding; torch-free, so that configs can hold
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` channels of a head with base `theta`.

    `scaling` is `default`, `linear`, `llama3` or `yarn`; the other fields are read by the forms
    that use them. `attention_factor` multiplies cosine and sine (yarn), 1.0 elsewhere.
    """

    rotary_dim: int
    theta: float
    max_positions: int
    scaling: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
