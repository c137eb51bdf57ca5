"""Owns the replacement of a loaded model's weights by those of another source, in place.

Knows no request and no cache: what was computed with the old weights is for others to forget.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from firstlight.assembly.build import AssembledModel, BuildOptions, assemble
from firstlight.assembly.source import WeightSource
from firstlight.checkpoint.loader import load_into
from firstlight.checkpoint.progress import Progress
from firstlight.kernels.registry import KernelSet
from firstlight.parallel.mesh import Mesh


def replace_weights(
    model: AssembledModel,
    source: WeightSource,
    *,
    mesh: Mesh,
    kernels: KernelSet,
    options: BuildOptions,
    progress: Progress | None = None,
) -> AssembledModel:
    """Returns the model with the weights of a source of the same config. Its module stays the same
    object, and unless weights are packed every tensor keeps its memory.

    Raises what loading raises; the model then holds old and new weights, or none, and must not be
    used until this succeeded.
    """
    if model.packed is not None and model.packed.weights:
        return _rebuilt(model, source, mesh=mesh, kernels=kernels, options=options)
    report = load_into(
        dict(model.weights),  # type: ignore[arg-type]  # none is packed
        source.weights,
        source.spec,
        mesh.place,
        progress=progress,
        threads=options.threads,
        check=options.check_digests,
        leader_of=options.leader_of,
    )
    return replace(model, report=report)


def _rebuilt(model: AssembledModel, source: WeightSource, **how: Any) -> AssembledModel:
    """Packed weights of other values have other sizes: the modules are made anew, the old ones
    given back before, so that there is never room for both needed."""
    module: nn.Module = model.module
    model.weights.clear()  # type: ignore[attr-defined]
    if model.packed is not None:
        model.packed.weights.clear()
    for name, _ in list(module.named_children()):
        setattr(module, name, nn.Identity())
    fresh = assemble(source.spec, source.weights, **how)
    for name, child in fresh.module.named_children():
        setattr(module, name, child)
    return replace(fresh, module=module)
