"""Tests of the kernels that read packed weights: bit-equal to the dense ones, close to references.

Shape letters as in kernels/packed_weight.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight.kernels.builtin import builtin_kernels, machine_query, reference_kernels
from firstlight.kernels.native import load_native
from firstlight.kernels.packed_weight import (
    FORMATS,
    PackedAttention,
    PackedMlp,
    PackedWeight,
    pack_weight,
)

NATIVE = builtin_kernels().resolve(machine_query())
REFERENCE = reference_kernels()
ROWS = (0, 1, 2, 5, 8, 9, 32, 100)

pytestmark = pytest.mark.skipif(
    not NATIVE.packs_weights, reason=f"native kernels: {load_native().reason or 'no tiles'}"
)


def _packed(weight: Tensor, name: str) -> PackedWeight:
    packed = pack_weight(weight, NATIVE.pack_weight_as)
    assert packed.format == name
    return packed


@pytest.mark.parametrize("name", [*FORMATS, "float32"])
@pytest.mark.parametrize("size", [(70, 576), (33, 96), (20, 4224)])
def test_linear_is_bit_equal_to_dense(weight_of, name, size) -> None:
    weight = weight_of(name, *size)
    packed, bias = _packed(weight, name), torch.randn(size[0])
    for rows in ROWS:
        x = torch.randn(rows, size[1])
        assert torch.equal(NATIVE.packed_linear(x, packed, bias), NATIVE.linear(x, weight, bias))
        assert torch.equal(NATIVE.packed_linear(x, packed), NATIVE.linear(x, weight, None))


@pytest.mark.parametrize(
    "names", [("affine4",) * 3, ("bfloat16",) * 3, ("scaled8", "bfloat16", "float32")]
)
@pytest.mark.parametrize("biased", [False, True])
def test_mlp_is_bit_equal_to_dense(weight_of, names, biased) -> None:
    sizes = ((160, 96), (160, 96), (96, 160))
    weights = [weight_of(n, *s, seed) for seed, (n, s) in enumerate(zip(names, sizes, strict=True))]
    biases = [torch.randn(s[0]) if biased else None for s in sizes]
    handle = PackedMlp(*map(_packed, weights, names), *biases)
    for rows in ROWS:
        x = torch.randn(rows, 96) * 0.01
        inner = NATIVE.gated_mlp_in(x, *weights[:2], *biases[:2])
        out = NATIVE.packed_mlp(x, handle)
        assert torch.equal(out, NATIVE.linear(inner, weights[2], biases[2]))
        wanted = REFERENCE.packed_mlp(x, handle)
        size = float(wanted.abs().max()) if rows else 0.0
        torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6 * size)


SEQUENCES = [
    [(1, 1)],
    [(1, 70), (1, 17), (1, 1)],
    [(3, 40), (5, 5)],
    [(1, 2100), (1, 30)],
    [(9, 20), (20, 60), (1, 33)],
]


def _attention(weight_of: Any, options: dict[str, bool]) -> tuple[PackedAttention, list[Tensor]]:
    """Return a module of 4 heads on 2, width 64, 32 channels, and its dense weights."""
    names = ("affine4", "bfloat16", "scaled8", "affine4")
    rows = (128, 64, 64, 64)
    inputs = (64, 64, 64, 128)
    weights = [weight_of(n, *size) * 0.25 for n, *size in zip(names, rows, inputs, strict=True)]
    norms = [torch.rand(32) + 0.5 if options["normed"] else None for _ in range(2)]
    angles = torch.arange(2200.0)[:, None] * torch.rand(16)
    tables = (angles.cos(), angles.sin()) if options["rotated"] else (None, None)
    biases = [torch.randn(n) if options["biased"] else None for n in rows]
    packed = map(_packed, weights, names)
    window = 20 if options["windowed"] else None
    return PackedAttention(*packed, *biases, *norms, 1e-5, 32, 0.2, window, *tables), weights


def _pages(sequences: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Return positions, keys, values, starts, contexts and the table; old rows are random."""
    starts = torch.tensor([0, *(tokens for tokens, _ in sequences)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in sequences]).int()
    positions = torch.cat([torch.arange(c - t, c) for t, c in sequences])
    width = -(-int(contexts.max()) // 16)
    table = torch.randperm(width * len(sequences)).int().view(len(sequences), width)
    return positions, *torch.randn(2, table.numel(), 2, 16, 32), starts, contexts, table


def _by_parts(x: Tensor, handle: PackedAttention, weights: list[Tensor], batch: Any) -> Tensor:
    """Return what the single native operations give."""
    positions, *pages = batch
    biases = (handle.q_bias_N, handle.k_bias_N, handle.v_bias_N)
    parts = NATIVE.linear_group(x, tuple(weights[:3]), biases)
    q, k, v = (part.view(len(x), -1, 32) for part in parts)
    if handle.q_norm_H is not None:
        flat = [part.reshape(-1, 32) for part in (q, k)]
        q = NATIVE.rms_norm(flat[0], handle.q_norm_H, 1e-5).view(q.shape)
        k = NATIVE.rms_norm(flat[1], handle.k_norm_H, 1e-5).view(k.shape)
    rest = (*pages, handle.scale, handle.window)
    if handle.cos_PR is None:
        out = NATIVE.paged_attention(q, k, v, *rest)
    else:
        out = NATIVE.rotary_paged_attention(q, k, v, positions, handle.cos_PR, handle.sin_PR, *rest)
    return NATIVE.linear(out.view(len(x), -1), weights[3], handle.o_bias_N)


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("option", ["plain", "rotated", "normed", "biased", "windowed"])
def test_attention_is_bit_equal_to_its_parts(weight_of, sequences, option) -> None:
    options = {name: name == option for name in ("rotated", "normed", "biased", "windowed")}
    handle, weights = _attention(weight_of, options)
    batch = _pages(sequences)
    x = torch.randn(len(batch[0]), 64) * 0.02
    outs, caches = [], []
    for function in (
        lambda *own: NATIVE.packed_attention(x, handle, *own),
        lambda *own: _by_parts(x, handle, weights, own),
        lambda *own: REFERENCE.packed_attention(x, handle, *own),
    ):
        own = (batch[0], batch[1].clone(), batch[2].clone(), *batch[3:])
        outs.append(function(*own))
        caches.append(torch.stack(own[1:3]))
    assert torch.equal(outs[0], outs[1]) and torch.equal(caches[0], caches[1])
    size = float(outs[2].abs().max())
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=1e-5 * size)
    torch.testing.assert_close(caches[0], caches[2], rtol=1e-4, atol=1e-4)


def test_a_page_outside_is_an_error_and_writes_nothing(weight_of) -> None:
    names = ("rotated", "normed", "biased", "windowed")
    handle, _ = _attention(weight_of, dict.fromkeys(names, False))
    positions, keys, values, starts, contexts, table = _pages([(2, 40)])
    table[0, 1] = len(keys)
    before = keys.clone()
    for kernels in (NATIVE, REFERENCE):
        with pytest.raises(IndexError):
            kernels.packed_attention(
                torch.randn(2, 64), handle, positions, keys, values, starts, contexts, table
            )
        assert torch.equal(keys, before)


def test_threads_change_nothing(weight_of) -> None:
    handle = PackedMlp(*(_packed(weight_of("affine4", 1024, 1024, s), "affine4") for s in range(3)))
    x, threads = torch.randn(3, 1024), torch.get_num_threads()
    try:
        outs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outs += [NATIVE.packed_mlp(x, handle) for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0]) for out in outs)
