"""Owns how a built module becomes one rank's part of a model: it edits the module by the rules.

Knows the rule table, not the model: which modules sum, what is cut along the vocabulary. A parallel
region is a module whose output the rules sum: going forward its output is summed; going backward
the gradients of its input and of every parameter inside it that several ranks hold are.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firstlight.layers.experts import DenseExperts, Mxfp4Experts
from firstlight.parallel.collectives import enter_region, gather_columns, sum_over
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.rules import ONCE, REPLICATED, Facts, RuleTable, TensorRule, expand
from firstlight.sharding.slices import slice_for


class VocabularyParallelEmbedding(nn.Module):
    """The rows [start, start + rows) of an embedding; other tokens give zeros, then ranks are
    summed.
    """

    def __init__(self, weight: nn.Parameter, start: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = weight
        self.start = start
        self.group = group

    def forward(self, tokens_T: Tensor) -> Tensor:
        """Returns the embedded tokens [T, D], whole on every rank."""
        local_T = tokens_T - self.start
        outside_T = (local_T < 0) | (local_T >= self.weight.shape[0])
        rows_TD = nn.functional.embedding(local_T.masked_fill(outside_T, 0), self.weight)
        return sum_over(self.group, rows_TD.masked_fill(outside_T[:, None], 0.0))


def apply_rules(model: nn.Module, table: RuleTable, facts: Facts, mesh: Mesh) -> None:
    """Makes `model`, whose parameters already have local shapes, compute its part of the whole.

    Does nothing at TP 1. `facts` and the table decide; class names play no role.
    """
    group = mesh.tensor
    if group is None:
        return
    modules = dict(model.named_modules())
    rules = {rule.name: rule for rule in expand(table, facts)}
    for name in _matching(modules, table.sums):
        _make_region(modules[name], group)
        for inner, parameter in _trained_inside(model, name):
            # Experts are held by one rank each, or cut: they have no rule if they were unpacked.
            if inner in rules and rules[inner].expert is None:
                _share_gradient(parameter, rules[inner], facts, mesh)
    _number_experts(model, facts, mesh)
    _cut_vocabulary(model, facts, mesh, group)


def _number_experts(model: nn.Module, facts: Facts, mesh: Mesh) -> None:
    """Tells modules of experts which of them this rank has: a run of equal length by EP index."""
    per_rank = facts.num_experts // mesh.place.layout.ep
    for module in model.modules():
        if isinstance(module, DenseExperts | Mxfp4Experts):
            module.first = mesh.place.ep_index * per_rank


def _matching(modules: dict[str, nn.Module], patterns: tuple[str, ...]) -> list[str]:
    names = [n for n in modules if any(fnmatchcase(n, p) for p in patterns)]
    # "*" also matches dots: keep a module only if its depth is the pattern's.
    depths = {p.count(".") for p in patterns}
    found = [n for n in names if n.count(".") in depths]
    assert found or not patterns, f"no module matches the summed patterns {patterns}"
    return found


def _make_region(module: nn.Module, group: dist.ProcessGroup) -> None:
    def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (enter_region(group, args[0]), *args[1:])

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return sum_over(group, output)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _trained_inside(model: nn.Module, region: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if name.startswith(region + ".") and parameter.requires_grad:
            yield name, parameter


def _share_gradient(parameter: nn.Parameter, rule: TensorRule, facts: Facts, mesh: Mesh) -> None:
    """Makes the gradient of a parameter in a region right on every rank that holds it.

    A rank computes the part of its own heads and columns. Ranks that hold the same values (all of
    a replicated tensor, runs of them where there are fewer KV heads than ranks) need the sum; a
    tensor held once gets its gradient once, or its zeros elsewhere would begin to move.
    """
    assert mesh.tensor is not None
    if rule.axis == REPLICATED:
        _hook_gradient(parameter, _summing_hook(mesh.tensor))
    elif rule.axis == ONCE:
        if mesh.place.tp_index != 0:
            _hook_gradient(parameter, torch.zeros_like)
    elif facts.axes[rule.axis].pieces < mesh.tp and not facts.axes[rule.axis].ragged:
        sharing = mesh.tp // facts.axes[rule.axis].pieces
        first = mesh.place.tp_index // sharing * sharing
        _hook_gradient(parameter, _run_summing_hook(mesh.tensor, range(first, first + sharing)))


def _hook_gradient(parameter: nn.Parameter, hook: Any) -> None:
    parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _summing_hook(group: dist.ProcessGroup) -> Any:
    def hook(grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return total

    return hook


def _run_summing_hook(group: dist.ProcessGroup, ranks: range) -> Any:
    """Sums over a run of the group's ranks. All ranks take part: they hold equal shapes."""

    def hook(grad: Tensor) -> Tensor:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, grad.contiguous(), group=group)
        return torch.stack([parts[rank] for rank in ranks]).sum(0)

    return hook


def _cut_vocabulary(model: Any, facts: Facts, mesh: Mesh, group: dist.ProcessGroup) -> None:
    vocabulary = TensorRule(
        source="", name="", unit="embed", shape=(facts.dims["vocab"], 1), axis="vocabulary", dim=0
    )
    part = slice_for(vocabulary, facts, mesh.place)
    if part is None:
        return
    # Of a pipeline stage the embedding or the head may be absent.
    if not isinstance(model.embed, nn.Identity):
        model.embed = VocabularyParallelEmbedding(model.embed.weight, part.start, group)
    if isinstance(model.head, nn.Identity):
        return
    vocab_size = facts.dims["vocab"]

    def leave(_module: nn.Module, _args: tuple[Any, ...], logits: Tensor) -> Tensor:
        if torch.is_grad_enabled() and logits.requires_grad:
            return gather_columns(group, logits)[..., :vocab_size]
        return _collect_columns(group, logits, mesh)[..., :vocab_size]

    _share_head_gradients(model.head, group)
    model.head.register_forward_hook(leave)


def _share_head_gradients(head: nn.Module, group: dist.ProcessGroup) -> None:
    """Each rank's columns give a part of the gradient of the head's input and of its norms."""

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        carry = type(args[0])(*(enter_region(group, part) for part in args[0]))
        return (carry, *args[1:])

    head.register_forward_pre_hook(enter)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad and not name.startswith("lm_head."):
            _hook_gradient(parameter, _summing_hook(group))


def _collect_columns(group: dist.ProcessGroup, part: Tensor, mesh: Mesh) -> Tensor:
    """The whole logits on the first rank, which samples; the others keep their own columns."""
    part = part.contiguous()
    first = dist.get_global_rank(group, 0)
    if not mesh.is_first:
        dist.gather(part, None, dst=first, group=group)
        return part
    parts = [torch.empty_like(part) for _ in range(mesh.tp)]
    dist.gather(part, parts, dst=first, group=group)
    return torch.cat(parts, -1)
