"""Owns the plain PyTorch form of packed weights and of the operations on them.

Operations unpack and then do what the dense references do; it knows no speed.

Shape letters: N rows of a weight, K columns, C blocks of 32 columns, T tokens, D model width,
H head channels; attention's own are those of reference/attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.packed_weight import BLOCK, PackedAttention, PackedMlp, PackedWeight
from firstlight.kernels.reference import attention, dense


def pack_weight_as(weight_NK: Tensor, name: str) -> Tensor | None:
    """Return the packed bytes [N, row_bytes] of an fp32 weight, or None if a value would change."""
    rows, columns = weight_NK.shape
    if columns % BLOCK or not columns:
        return None
    if name == "bfloat16":
        halves = weight_NK.contiguous().view(torch.int16).view(rows, columns, 2)
        if halves[..., 0].any():
            return None
        return halves[..., 1].contiguous().view(torch.uint8)
    x_NCB = weight_NK.contiguous().view(rows, -1, BLOCK)
    guesses = _affine_guesses(x_NCB) if name == "affine4" else _scaled_guesses(x_NCB)
    return _first_fit(x_NCB, guesses, name)


def unpack(packed: PackedWeight) -> Tensor:
    """Return the fp32 weight [N, K] that was packed, bit for bit."""
    if packed.format == "float32":
        return packed.data
    if packed.format == "bfloat16":
        wide_NK = packed.data.view(torch.int16).int() << 16
        return wide_NK.view(torch.float32)
    blocks = packed.columns // BLOCK
    scales_NC = packed.data[:, : 2 * blocks].contiguous().view(torch.float16).float()
    if packed.format == "scaled8":
        q_NCB = packed.data[:, 2 * blocks :].view(torch.int8).view(packed.rows, blocks, BLOCK)
        return (q_NCB * scales_NC[..., None]).view(packed.rows, packed.columns)
    offsets_NC = packed.data[:, 2 * blocks : 4 * blocks].contiguous().view(torch.float16).float()
    pairs_NCB = packed.data[:, 4 * blocks :].reshape(packed.rows, blocks, BLOCK // 2)
    q_NCB = torch.cat((pairs_NCB & 15, pairs_NCB >> 4), -1)
    return (q_NCB * scales_NC[..., None] + offsets_NC[..., None]).view(packed.rows, packed.columns)


def packed_rows(packed: PackedWeight, ids_T: Tensor) -> Tensor:
    """Return the chosen rows [T, K]; raises IndexError for an id outside the weight."""
    if ids_T.numel() and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < packed.rows:
        raise IndexError(f"a row is outside the {packed.rows} rows of the weight")
    chosen = packed.data.index_select(0, ids_T)
    return unpack(PackedWeight(packed.format, len(ids_T), packed.columns, chosen))


def packed_linear(x_TK: Tensor, packed: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """Return x times the transposed weight, plus the bias."""
    return dense.linear(x_TK, unpack(packed), bias_N)


def packed_mlp(x_TD: Tensor, handle: PackedMlp) -> Tensor:
    """Return down(silu(gate(x)) * up(x))."""
    inner_TF = dense.gated_mlp_in(
        x_TD, unpack(handle.gate), unpack(handle.up), handle.gate_bias_N, handle.up_bias_N
    )
    return dense.linear(inner_TF, unpack(handle.down), handle.down_bias_N)


def packed_attention(
    x_TD: Tensor,
    handle: PackedAttention,
    positions_T: Tensor,
    keys_PKSH: Tensor,
    values_PKSH: Tensor,
    starts_B1: Tensor,
    contexts_B: Tensor,
    table_BP: Tensor,
) -> Tensor:
    """Project, normalise, rotate, write into the pages, attend and project back: [T, D].

    Changes the pages and raises as `paged_attention` does.
    """
    size = (len(x_TD), -1, handle.head_dim)
    q_TNH = dense.linear(x_TD, unpack(handle.q), handle.q_bias_N).view(size)
    k_TKH = dense.linear(x_TD, unpack(handle.k), handle.k_bias_N).view(size)
    v_TKH = dense.linear(x_TD, unpack(handle.v), handle.v_bias_N).view(size)
    if handle.q_norm_H is not None:
        q_TNH = dense.rms_norm(q_TNH, handle.q_norm_H, handle.norm_epsilon)
    if handle.k_norm_H is not None:
        k_TKH = dense.rms_norm(k_TKH, handle.k_norm_H, handle.norm_epsilon)
    if handle.cos_PR is not None and handle.sin_PR is not None:
        q_TNH, k_TKH = dense.rotary(q_TNH, k_TKH, positions_T, handle.cos_PR, handle.sin_PR)
    pages = (keys_PKSH, values_PKSH, starts_B1, contexts_B, table_BP)
    out_TNH = attention.paged_attention(q_TNH, k_TKH, v_TKH, *pages, handle.scale, handle.window)
    return dense.linear(out_TNH.reshape(len(x_TD), -1), unpack(handle.o), handle.o_bias_N)


def _affine_guesses(x_NCB: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (d, m) of blocks that use all of 0..15, or whose greatest magnitude is -8 d."""
    least, most = x_NCB.amin(-1), x_NCB.amax(-1)
    base = torch.where(most.abs() > least.abs(), most, least)
    return [((most - least) / 15, least), (base / -8, base)]


def _scaled_guesses(x_NCB: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = x_NCB.abs().amax(-1)
    steps = (127.0, 8.0, -8.0, 128.0, -128.0)
    return [(size / count, torch.zeros_like(size)) for count in steps]


def _first_fit(x_NCB: Tensor, guesses: list[tuple[Tensor, Tensor]], name: str) -> Tensor | None:
    """Return rows of d, m (affine4 only) and q, each block by the first guess that keeps it."""
    least, most = (0, 15) if name == "affine4" else (-128, 127)
    found = torch.zeros(x_NCB.shape[:2], dtype=torch.bool)
    d_NC, m_NC = torch.zeros(2, *x_NCB.shape[:2])
    q_NCB = torch.zeros_like(x_NCB)
    for guess_d, guess_m in guesses:
        d, m = (guess.half().float()[..., None] for guess in (guess_d, guess_m))
        # Adding zero makes a negative zero positive: no integer could keep its sign.
        q = ((x_NCB - m) / d).nan_to_num(0).round().clamp(least, most) + 0.0
        values = q * d + m if name == "affine4" else q * d
        fits = (values.view(torch.int32) == x_NCB.view(torch.int32)).all(-1)
        fits &= (d.isfinite() & m.isfinite())[..., 0]
        fresh = (fits & ~found)[..., None]
        d_NC = torch.where(fresh[..., 0], d[..., 0], d_NC)
        m_NC = torch.where(fresh[..., 0], m[..., 0], m_NC)
        q_NCB = torch.where(fresh, q, q_NCB)
        found |= fits
    if not found.all():
        return None
    scales = [d_NC.half().view(torch.uint8)]
    if name == "affine4":
        scales.append(m_NC.half().view(torch.uint8))
        q = q_NCB.to(torch.uint8)
        q = q[..., : BLOCK // 2] | q[..., BLOCK // 2 :] << 4
    else:
        q = q_NCB.to(torch.int8).view(torch.uint8)
    return torch.cat((*scales, q.flatten(1)), 1)
