"""Owns the kernels of training on a CPU: the operations of a KernelSet, each with its gradient.

Same names and meaning as the plain ones; what a fast form does not take goes to the plain form.

Shape letters: T tokens, D width, B rows of the bank, N heads, K key and value channels, C
channels of the convolution, W taps, F inner width, R rows of one expert, E experts, J chosen.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.kernels.activation import Activation
from firstlight.kernels.builtin import reference_kernels
from firstlight.kernels.registry import KernelSet
from firstlight.training.native import load_training_library

CHANNELS = (16, 32, 64)  # head sizes the compiled delta rule knows
_SPAN = 16  # tokens between kept states, as in delta_rule.cpp

Library = Any  # ctypes.CDLL, whose functions are found by name


def training_kernels() -> KernelSet:
    """Returns kernels with gradients for training: compiled ones on a CPU that has a compiler,
    else the plain ones. They take fp32; other dtypes go to the plain kernels.
    """
    plain = reference_kernels()
    library = load_training_library()
    grouped = dataclasses.replace(
        plain,
        attention=lambda *args, **named: attention(plain.attention, *args, **named),
        experts=experts_of(plain),
    )
    if library is None:
        return grouped
    fast = _Compiled(library, plain)
    kernels = dataclasses.replace(
        grouped,
        gated_activation=fast.gated_activation,
        rms_norm=fast.rms_norm,
        residual_mix=fast.residual_mix,
        short_conv=fast.short_conv,
        delta_rule=fast.delta_rule,
    )
    return dataclasses.replace(kernels, experts=experts_of(kernels))


class _Compiled:
    """The compiled operations of a library, with the plain kernels behind them."""

    def __init__(self, library: Library, plain: KernelSet) -> None:
        self.library = library
        self.plain = plain

    def gated_activation(self, gate_TF: Tensor, up_TF: Tensor, activation: Activation) -> Tensor:
        if activation.beta is None or activation.linear_beta is None or not _fits(gate_TF, up_TF):
            out: Tensor = self.plain.gated_activation(gate_TF, up_TF, activation)
            return out
        betas = (activation.beta, activation.linear_beta)
        return _applied(_Gated, self.library, gate_TF, up_TF, betas)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        if not _fits(x_TD, weight_D):
            out: Tensor = self.plain.rms_norm(x_TD, weight_D, epsilon)
            return out
        return _applied(_Norm, self.library, x_TD, weight_D, epsilon)

    def residual_mix(
        self, bank_TBD: Tensor, current_TD: Tensor, query_D: Tensor, epsilon: float
    ) -> Tensor:
        if not _fits(bank_TBD, current_TD, query_D):
            out: Tensor = self.plain.residual_mix(bank_TBD, current_TD, query_D, epsilon)
            return out
        return _applied(_Mix, self.library, bank_TBD, current_TD, query_D, epsilon)

    def short_conv(
        self, x_TC: Tensor, weight_C1W: Tensor, starts_B1: Tensor, *state: Tensor
    ) -> Tensor:
        if state or not _fits(x_TC, weight_C1W):
            out: Tensor = self.plain.short_conv(x_TC, weight_C1W, starts_B1, *state)
            return out
        weight_WC = weight_C1W.squeeze(1).t().contiguous()
        return _applied(_Convolution, self.library, x_TC, weight_WC, starts_B1.long())

    def delta_rule(
        self,
        q_TNK: Tensor,
        k_TNK: Tensor,
        v_TNK: Tensor,
        decay_TNK: Tensor,
        beta_TN: Tensor,
        starts_B1: Tensor,
        *state: Tensor,
    ) -> Tensor:
        inputs = (q_TNK, k_TNK, v_TNK, decay_TNK, beta_TN)
        is_square = q_TNK.shape[-1] == v_TNK.shape[-1] and q_TNK.shape[-1] in CHANNELS
        if state or not is_square or not _fits(*inputs):
            out: Tensor = self.plain.delta_rule(*inputs, starts_B1, *state)
            return out
        return _applied(_DeltaRule, self.library, *inputs, starts_B1.long())


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, library: Library, gate: Tensor, up: Tensor, betas: tuple[float, float]
    ) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        library.gated_forward(
            _size(gate.numel()), _at(gate), _at(up), _at(out), *map(ctypes.c_float, betas)
        )
        ctx.save_for_backward(gate, up)
        ctx.library, ctx.betas = library, betas
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        ctx.library.gated_backward(
            _size(gate.numel()),
            *map(_at, (gate, up, grad, dgate, dup)),
            *map(ctypes.c_float, ctx.betas),
        )
        return None, dgate, dup, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: Library, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        out, inverse = torch.empty_like(x), x.new_empty(rows)
        library.norm_forward(
            _size(rows), _size(width), _at(x), _at(weight), ctypes.c_float(epsilon), _at(out),
            _at(inverse),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, inverse)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad = grad.contiguous()
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        ctx.library.norm_backward(
            _size(len(inverse)),
            _size(x.shape[-1]),
            *map(_at, (x, weight, inverse, grad, dx, dweight)),
        )
        return None, dx, dweight, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, library: Library, bank: Tensor, current: Tensor, query: Tensor, epsilon: float
    ) -> Tensor:
        bank, current, query = bank.contiguous(), current.contiguous(), query.contiguous()
        rows, banked, width = bank.shape
        out = torch.empty_like(current)
        shares, inverses = bank.new_empty(2, rows, banked + 1).unbind(0)
        library.mix_forward(
            _size(rows), _size(banked), _size(width), _at(bank), _at(current), _at(query),
            ctypes.c_float(epsilon), _at(out), _at(shares), _at(inverses),
        )  # fmt: skip
        ctx.save_for_backward(bank, current, query, shares, inverses)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bank, current, query, shares, inverses = ctx.saved_tensors
        grad = grad.contiguous()
        dbank, dcurrent = torch.empty_like(bank), torch.empty_like(current)
        dquery = torch.zeros_like(query)
        ctx.library.mix_backward(
            *map(_size, bank.shape),
            *map(_at, (bank, current, query, shares, inverses, grad, dbank, dcurrent, dquery)),
        )
        return None, dbank, dcurrent, dquery, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: Library, x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
        x, starts = x.contiguous(), starts.contiguous()
        before, out = torch.empty_like(x), torch.empty_like(x)
        library.convolution_forward(
            _size(len(starts) - 1), _at(starts), _size(x.shape[1]), _size(len(weight)),
            *map(_at, (x, weight, before, out)),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, starts, before)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, starts, before = ctx.saved_tensors
        grad = grad.contiguous()
        dbefore = before.clone()  # becomes its own gradient in place
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        ctx.library.convolution_backward(
            _size(len(starts) - 1), _at(starts), _size(x.shape[1]), _size(len(weight)),
            *map(_at, (x, weight, grad, dbefore, dx, dweight)),
        )  # fmt: skip
        return None, dx, dweight, None


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: Library, *inputs: Tensor) -> Tensor:
        q, k, v, decay, beta, starts = (x.contiguous() for x in inputs)
        tokens, heads, channels = q.shape
        states = tokens // _SPAN + len(starts)
        kept = q.new_empty(states, heads, channels, channels)
        out = torch.empty_like(v)
        done = library.delta_forward(
            *map(_size, (len(starts) - 1,)), _at(starts), _size(heads), _size(channels),
            *map(_at, (q, k, v, decay, beta, out, kept)),
        )  # fmt: skip
        assert done, f"heads of {channels} channels are not compiled"
        ctx.save_for_backward(q, k, v, decay, beta, starts, kept)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, beta, starts, kept = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = [torch.empty_like(x) for x in (q, k, v, decay, beta)]
        ctx.library.delta_backward(
            _size(len(starts) - 1), _at(starts), _size(q.shape[1]), _size(q.shape[2]),
            *map(_at, (q, k, v, decay, beta, kept, grad, *gradients)),
        )  # fmt: skip
        return None, *gradients, None


def attention(
    plain: Callable[..., Tensor],
    q_TNK: Tensor,
    k_TNK: Tensor,
    v_TNV: Tensor,
    starts_B1: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attends causally within each sequence; sequences of one length go through one call."""
    starts = starts_B1.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    if window is not None or not lengths:
        return plain(q_TNK, k_TNK, v_TNV, starts_B1, scale, window)
    is_even = len(set(lengths)) == 1
    size = (len(lengths), lengths[0])
    spans = [slice(None)] if is_even else [slice(*span) for span in pairwise(starts)]
    parts = []
    for span in spans:
        shape = size if is_even else (1, span.stop - span.start)
        q, k, v = (
            x[span].reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in (q_TNK, k_TNK, v_TNV)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return parts[0] if is_even else torch.cat(parts)


def experts_of(kernels: KernelSet) -> Callable[..., Tensor]:
    """Returns routed experts whose matrix products and activation run once over sorted rows.

    Rows are sorted by expert, so that each expert works on one slice and the activation on all.
    """

    def experts(
        x_TL: Tensor,
        ids_TJ: Tensor,
        weights_TJ: Tensor,
        w1_EFL: Tensor,
        w3_EFL: Tensor,
        w2_ELF: Tensor,
        first: int,
        activation: Activation,
    ) -> Tensor:
        num_experts, chosen = len(w1_EFL), ids_TJ.shape[1]
        local_R = (ids_TJ - first).flatten()
        if num_experts <= int(local_R.max()) or int(local_R.min()) < 0:
            out: Tensor = reference_kernels().experts(
                x_TL, ids_TJ, weights_TJ, w1_EFL, w3_EFL, w2_ELF, first, activation
            )
            return out
        order_R = local_R.argsort(stable=True)
        bounds = torch.bincount(local_R, minlength=num_experts).cumsum(0).tolist()
        tokens_R = order_R // chosen
        rows_RL = x_TL.index_select(0, tokens_R)
        gate_RF = _applied(_ByExpert, rows_RL, w1_EFL, bounds)
        up_RF = _applied(_ByExpert, rows_RL, w3_EFL, bounds)
        part_RL = _applied(
            _ByExpert, kernels.gated_activation(gate_RF, up_RF, activation), w2_ELF, bounds
        )
        shares_R1 = weights_TJ.flatten().index_select(0, order_R).unsqueeze(1)
        return torch.zeros_like(x_TL).index_add(0, tokens_R, part_RL * shares_R1)

    return experts


class _ByExpert(torch.autograd.Function):
    """Rows [bounds[e - 1], bounds[e]) times the transposed matrix of expert e."""

    @staticmethod
    def forward(ctx: Any, rows_RL: Tensor, w_EFL: Tensor, bounds: list[int]) -> Tensor:
        out_RF = rows_RL.new_empty(len(rows_RL), w_EFL.shape[1])
        for expert, (begin, end) in enumerate(pairwise([0, *bounds])):
            torch.mm(rows_RL[begin:end], w_EFL[expert].t(), out=out_RF[begin:end])
        ctx.save_for_backward(rows_RL, w_EFL)
        ctx.bounds = bounds
        return out_RF

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
        rows_RL, w_EFL = ctx.saved_tensors
        drows_RL, dw_EFL = torch.empty_like(rows_RL), torch.empty_like(w_EFL)
        for expert, (begin, end) in enumerate(pairwise([0, *ctx.bounds])):
            torch.mm(grad_RF[begin:end], w_EFL[expert], out=drows_RL[begin:end])
            torch.mm(grad_RF[begin:end].t(), rows_RL[begin:end], out=dw_EFL[expert])
        return drows_RL, dw_EFL, None


def _applied(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return out


def _fits(*tensors: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def _at(x: Tensor) -> ctypes.c_void_p:
    """The address of a tensor, which the caller must hold by a name until the call has returned."""
    return ctypes.c_void_p(x.data_ptr())


def _size(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
