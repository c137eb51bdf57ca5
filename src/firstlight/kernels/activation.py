"""Owns the names of gated activations; knows no tensor."""

from typing import NamedTuple


class Activation(NamedTuple):
    """What joins gate and up in a feed-forward: SiLU(gate) * up when `beta` is None, else SiTU.

    SiTU: [beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)], in fp32.
    """

    beta: float | None = None
    linear_beta: float | None = None


SILU = Activation()
