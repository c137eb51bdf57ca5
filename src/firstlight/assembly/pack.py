"""Owns the swap of a loaded model's modules for packed ones, and what it saved.

Knows the layers, not the model; it runs before the rules are applied, which hook modules by name.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from firstlight.kernels.packed_weight import (
    PackedAttention,
    PackedMlp,
    PackedWeight,
    pack_weight,
)
from firstlight.kernels.registry import KernelSet
from firstlight.layers.gated_mlp import GatedMLP
from firstlight.layers.gqa_attention import GroupedQueryAttention
from firstlight.layers.packed_modules import (
    PackedEmbedding,
    PackedGatedMLP,
    PackedGroupedQueryAttention,
    PackedLinear,
    PackedMatrix,
)


@dataclass(frozen=True)
class PackReport:
    """Bytes of the weights before and after packing, and how many took which format; `weights` are
    those that are packed, by the name their parameter had."""

    bytes_before: int = 0
    bytes_after: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    weights: dict[str, PackedWeight] = field(default_factory=dict)


def pack_modules(module: nn.Module, kernels: KernelSet) -> PackReport:
    """Swaps attention, feed-forward, embedding and linear modules in place for packed ones.

    Each parameter is emptied as soon as it is packed, so that its memory goes back unless another
    tensor shares it. Modules that share a weight share its packed copy. Does nothing, with an
    empty report, when the kernels have no fast form of packed weights; modules whose weights are
    not fp32 on the CPU stay.
    """
    if not kernels.packs_weights:
        return PackReport()
    packer = _Packer(kernels, {id(p): name for name, p in module.named_parameters()})
    _swap_children(module, packer)
    packer.free()
    _return_free_memory()
    return packer.report()


class _Packer:
    """Packs each weight once, by the identity of its tensor."""

    def __init__(self, kernels: KernelSet, names: dict[int, str]) -> None:
        self.kernels = kernels
        self._names = names
        self.done: dict[int, tuple[Tensor, PackedWeight]] = {}
        self.bytes_before = 0

    def pack(self, weight: Tensor) -> PackedWeight:
        found = self.done.get(id(weight))
        if found is not None:
            return found[1]
        self.bytes_before += weight.numel() * weight.element_size()
        packed = pack_weight(weight.detach(), self.kernels.pack_weight_as)
        self.done[id(weight)] = (weight, packed)
        if packed.format != "float32":
            weight.data = weight.new_empty(0)
        return packed

    def free(self) -> None:
        """Forgets which tensors were packed; the report is of the packed ones."""
        self.done = {key: (torch.empty(0), packed) for key, (_, packed) in self.done.items()}

    def report(self) -> PackReport:
        packed = [weight for _, weight in self.done.values()]
        formats: dict[str, int] = {}
        for weight in packed:
            formats[weight.format] = formats.get(weight.format, 0) + 1
        after = sum(weight.num_bytes for weight in packed)
        named = {self._names[key]: packed for key, (_, packed) in self.done.items()}
        own = {name: weight for name, weight in named.items() if weight.format != "float32"}
        return PackReport(self.bytes_before, after, formats, own)


def _swap_children(module: nn.Module, packer: _Packer) -> None:
    for name, child in list(module.named_children()):
        swapped = _packed(child, packer)
        if swapped is None:
            _swap_children(child, packer)
        else:
            setattr(module, name, swapped.eval())


def _packed(module: nn.Module, packer: _Packer) -> nn.Module | None:
    """Returns the packed module, or None for one to be left or searched."""
    if type(module) not in (GatedMLP, GroupedQueryAttention, nn.Linear, nn.Embedding):
        return None
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in module.parameters()):
        return None
    if isinstance(module, GatedMLP):
        return _packed_mlp(module, packer)
    if isinstance(module, GroupedQueryAttention):
        return _packed_attention(module, packer)
    assert isinstance(module, nn.Linear | nn.Embedding)
    matrix = PackedMatrix(packer.pack(module.weight), packer.kernels)
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(matrix)
    return PackedLinear(matrix, module.bias)


def _packed_mlp(module: GatedMLP, packer: _Packer) -> PackedGatedMLP:
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    handle = PackedMlp(
        gate=packer.pack(gate.weight),
        up=packer.pack(up.weight),
        down=packer.pack(down.weight),
        gate_bias_N=gate.bias,
        up_bias_N=up.bias,
        down_bias_N=down.bias,
    )
    return PackedGatedMLP(handle, packer.kernels)


def _packed_attention(
    module: GroupedQueryAttention, packer: _Packer
) -> PackedGroupedQueryAttention:
    shape, rotary = module.shape, module.__dict__["rotary"]
    normed = shape.norm_epsilon is not None
    handle = PackedAttention(
        q=packer.pack(module.q_proj.weight),
        k=packer.pack(module.k_proj.weight),
        v=packer.pack(module.v_proj.weight),
        o=packer.pack(module.o_proj.weight),
        q_bias_N=module.q_proj.bias,
        k_bias_N=module.k_proj.bias,
        v_bias_N=module.v_proj.bias,
        o_bias_N=module.o_proj.bias,
        q_norm_H=module.q_norm.weight if normed else None,
        k_norm_H=module.k_norm.weight if normed else None,
        norm_epsilon=shape.norm_epsilon or 0.0,
        head_dim=shape.head_dim,
        scale=module.scale,
        window=shape.window,
        cos_PR=rotary.cos_PR if rotary is not None else None,
        sin_PR=rotary.sin_PR if rotary is not None else None,
    )
    return PackedGroupedQueryAttention(handle, packer.kernels)


def _return_free_memory() -> None:
    """Gives the freed heap back to the system where the C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
