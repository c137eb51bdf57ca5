"""Owns a model in training: built from a config on fp32 parameters, cut by the rules, and what it
computes of a batch. It knows no task and no optimiser.

Shape letters: T tokens, D model width, M places that count, N patches, C channels, P patch side, E
experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.assembly.build import build_on_meta, install
from firstlight.kernels.registry import KernelSet
from firstlight.layers.attention_residual import ResidualCarry
from firstlight.layers.experts import Router
from firstlight.layers.packed_batch import PlacedFeatures
from firstlight.models.spec import ModelSpec, read_model_spec
from firstlight.parallel.apply import apply_rules
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.layout import Place
from firstlight.sharding.slices import local_shape, slice_for
from firstlight.training.examples import Picture, TrainingBatch
from firstlight.training.initial import initial_values
from firstlight.training.vision_batch import encode


def build_trainable(
    config: Mapping[str, Any],
    kernels: KernelSet,
    seed: int,
    *,
    mesh: Mesh | None = None,
) -> Trainable:
    """Returns a model of a config without quantisation, with values from the seed; on a mesh this
    rank's part of it. Raises LayoutError when the model cannot be cut that way.
    """
    spec = read_model_spec(config)
    assert not spec.config.moe.quantised, "experts are trained dense"
    module = build_on_meta(spec, kernels, 0)
    values = initial_values(spec, seed)
    install(module, values if mesh is None else local_values(spec, values, mesh.place), spec)
    module.requires_grad_(True).train()
    if mesh is not None:
        apply_rules(module, spec.family.table, spec.facts, mesh)
    return Trainable(module, spec)


def local_values(spec: ModelSpec, values: Mapping[str, Tensor], place: Place) -> dict[str, Tensor]:
    """Returns a rank's part of whole values, local experts stacked, as loading would give it."""
    parts: dict[str, list[Tensor]] = {}
    for rule in spec.tensors:
        part = slice_for(rule, spec.facts, place)
        if part is None:
            continue
        whole = values[rule.name]
        if rule.stacked and rule.expert is not None:
            whole = whole[rule.expert]
        own = torch.zeros(local_shape(rule, part))
        if not part.zero:
            held = part.stop - part.start
            own.narrow(part.dim, 0, held).copy_(whole.narrow(part.dim, part.start, held))
        parts.setdefault(rule.name, []).append(own)
    stacked = {rule.name for rule in spec.tensors if rule.stacked}
    return {n: torch.stack(p) if n in stacked else p[0] for n, p in parts.items()}


class Trainable:
    """A module with gradients, its spec, and the load of its experts in the last forward pass."""

    def __init__(self, module: Any, spec: ModelSpec) -> None:
        self.module = module
        self.spec = spec
        self.routers = [m for m in module.modules() if isinstance(m, Router)]
        for router in self.routers:
            router.bias.requires_grad_(False)
        self._loads: dict[int, Tensor] = {}
        for index, router in enumerate(self.routers):
            router.register_forward_hook(self._counter(index))

    def logits(self, batch: TrainingBatch) -> Tensor:
        """Returns [M, vocabulary] at the places that count."""
        packed = batch.packed
        if batch.pictures:
            features = PlacedFeatures(*self.features(batch.pictures))
            packed = dataclasses.replace(packed, features=features)
        carry = self.module(batch.tokens_T, packed)
        if isinstance(carry, ResidualCarry):
            chosen = ResidualCarry(
                carry.sum_TD.index_select(0, batch.places_M),
                carry.bank_TBD.index_select(0, batch.places_M),
            )
        else:
            chosen = carry._replace(x_TD=carry.x_TD.index_select(0, batch.places_M))
        logits: Tensor = self.module.head(chosen)
        return logits

    def features(self, pictures: Sequence[Picture]) -> tuple[Tensor, Tensor]:
        """Returns the tokens that pictures take, [M], and their features, [M, D]."""
        rows = encode(self.module, pixels(pictures, self.spec), [p.grid for p in pictures])
        places = [
            torch.arange(p.first, p.first + len(x)) for p, x in zip(pictures, rows, strict=True)
        ]
        return torch.cat(places), torch.cat(rows)

    def balance(self, rate: float) -> float:
        """Moves each router's bias toward even load (arXiv:2408.15664), from the last forward
        pass; returns the largest load of an expert relative to the mean.
        """
        worst = 0.0
        for index, load_E in self._loads.items():
            mean = load_E.mean()
            worst = max(worst, float(load_E.max() / mean))
            bias_E = self.routers[index].bias
            with torch.no_grad():
                bias_E.add_(torch.sign(mean - load_E), alpha=rate)
                bias_E.sub_(bias_E.mean())
        return worst

    def _counter(self, index: int) -> Any:
        def count(module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            assert isinstance(module, Router)
            experts = module.shape.experts
            self._loads[index] = torch.bincount(output[0].flatten(), minlength=experts).float()

        return count


def pixels(pictures: Sequence[Picture], spec: ModelSpec) -> Tensor:
    """Returns patches [N, C, P, P] normalised to [-1, 1], as the service does."""
    vision = spec.config.vision
    data = b"".join(p.patches for p in pictures)
    levels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    shape = (-1, vision.channels, vision.patch, vision.patch)
    return (levels.view(shape).float() / 255.0 - 0.5) / 0.5


@contextmanager
def held_values(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Gives copies of all parameters, and puts them back at the end."""
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    try:
        yield kept
    finally:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(kept[name])
