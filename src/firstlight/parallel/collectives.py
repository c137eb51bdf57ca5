"""Owns the collectives a model's forward and backward need; knows no module and no rule.

Each pair is its own transpose: what sums on the way forward passes gradients through, and the
reverse.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(group: dist.ProcessGroup, partial: Tensor) -> Tensor:
    """Returns the sum of all ranks' partial results; without gradients the input is overwritten."""
    if torch.is_grad_enabled() and partial.requires_grad:
        return _SumForward.apply(partial, group)  # type: ignore[no-any-return,no-untyped-call]
    out = partial.contiguous()
    dist.all_reduce(out, group=group)
    return out


def enter_region(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Returns x unchanged; its gradient is summed over the ranks, because each saw only its
    part.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _SumBackward.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
    return x


def gather_columns(group: dist.ProcessGroup, part: Tensor) -> Tensor:
    """Returns the ranks' parts side by side along the last dim, on every rank, with gradients."""
    return _GatherColumns.apply(part, group)  # type: ignore[no-any-return,no-untyped-call]


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = partial.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.index = part.shape[-1], dist.get_rank(group)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the same loss from the whole row, so its own columns are its gradient.
        start = ctx.index * ctx.width
        return grads[0][..., start : start + ctx.width].contiguous(), None
