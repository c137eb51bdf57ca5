"""Which form of latent attention serves a span: by multiplications, or by what a kernel reaches."""

import pytest

from firstlight.layers.mla_attention import ANY_LENGTH, LatentShape, absorbed_up_to

K3 = LatentShape(
    hidden=7168,
    heads=96,
    q_rank=1536,
    latent=512,
    own=128,
    shared=64,
    value=128,
    gated=True,
    latent_epsilon=1e-6,
)


def multiplications(tokens: int) -> tuple[int, int]:
    """Of one context row and head: absorbed, and expanded."""
    absorbed = tokens * (512 + 64 + 512)
    return absorbed, 512 * (128 + 128) + tokens * (128 + 64 + 128)


@pytest.mark.parametrize("tokens", [1, 100, 170, 171, 4096])
def test_plain_operations_take_the_form_with_fewer_multiplications(tokens: int) -> None:
    absorbed, expanded = multiplications(tokens)
    assert (tokens <= absorbed_up_to(K3)) == (absorbed <= expanded)


def test_a_kernel_for_the_absorbed_form_serves_every_length() -> None:
    assert absorbed_up_to(K3, plain=False) == ANY_LENGTH
