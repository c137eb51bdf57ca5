"""Owns the one way a model comes to be: built without storage, allocated in local shapes, loaded,
cut.

Knows no request and no cache.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from firstlight.assembly.pack import PackReport, pack_modules
from firstlight.checkpoint.loader import LoadReport, load_into
from firstlight.checkpoint.read_plan import kept_types, parameter_shapes
from firstlight.checkpoint.torch_types import TORCH_TYPES
from firstlight.checkpoint.watched_weights import Held
from firstlight.kernels.registry import KernelSet
from firstlight.layers.experts import Mxfp4Experts, to_dense
from firstlight.models.spec import ModelSpec
from firstlight.parallel.apply import apply_rules
from firstlight.parallel.mesh import Mesh
from firstlight.sharding.slices import held_bytes


@dataclass(frozen=True)
class BuildOptions:
    """How a model is built: compute dtype, device, positions of the rotary tables, reader
    threads.

    A `trainable` model has gradients; it needs kernels that have them. Weights are packed, without
    loss, when `pack` is set and the kernels gain by it; a trainable model keeps plain ones. Of a
    group `leader_of` the first rank reads the store for all.
    """

    dtype: torch.dtype
    device: torch.device
    num_positions: int
    threads: int = 2
    check_digests: bool = True
    trainable: bool = False
    pack: bool = True
    leader_of: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class AssembledModel:
    """A rank's part of a model, ready to run. `planned_bytes` follows from the rules alone;
    `allocated_bytes` is what loading took, before weights were packed. `weights` is what kernels
    read, by the name of the rule that fills it; nothing of a trainable model.
    """

    module: Any
    report: LoadReport
    planned_bytes: int
    allocated_bytes: int
    packed: PackReport | None = None
    weights: Mapping[str, Held] = field(default_factory=dict)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all weights since they were packed; 0 when none were."""
        if self.packed is None or not self.packed.bytes_before:
            return 0
        return self.allocated_bytes - self.packed.bytes_before + self.packed.bytes_after


def assemble(
    spec: ModelSpec,
    source: Any,
    *,
    mesh: Mesh,
    kernels: KernelSet,
    options: BuildOptions,
    progress: Any = None,
) -> AssembledModel:
    """Builds the model on meta, allocates this rank's part, fills it from a store or checkpoint.

    Raises LayoutError before anything is allocated when the model cannot be cut this way, and what
    the loader raises for missing, damaged or short data.
    """
    module = build_on_meta(spec, kernels, options.num_positions)
    parameters = allocate(spec, mesh, options)
    install(module, parameters, spec)
    report = load_into(
        parameters,
        source,
        spec,
        mesh.place,
        progress=progress,
        threads=options.threads,
        check=options.check_digests,
        leader_of=options.leader_of,
    )
    move_buffers(module, options.device)
    # Before the rules are applied: they put hooks on the gradients there are.
    if options.trainable:
        unpack_experts(module, options.dtype)
    set_trainable(module, options.trainable)
    allocated_bytes = sum(t.untyped_storage().nbytes() for t in parameters.values())
    names = () if options.trainable else tuple(parameters)
    weights: dict[str, Held] = {name: module.get_parameter(name) for name in names}
    parameters.clear()  # or what is packed would stay in memory
    packs = options.pack and not options.trainable
    packed = pack_modules(module, kernels) if packs else None
    weights.update(packed.weights if packed is not None else {})
    apply_rules(module, spec.family.table, spec.facts, mesh)
    return AssembledModel(
        module=module,
        report=report,
        planned_bytes=planned_bytes(spec, mesh, options.dtype),
        allocated_bytes=allocated_bytes,
        packed=packed,
        weights=weights,
    )


def rehearse_rank(
    spec: ModelSpec, mesh: Mesh, *, kernels: KernelSet, dtype: torch.dtype
) -> tuple[nn.Module, int]:
    """Builds and cuts a rank's part without storage; returns it and the bytes it would take.

    What fails here would fail at a start: names, shapes, layouts, regions. Shapes and types are
    those of a real start; of a pipeline stage only its own modules are there.
    """
    module = build_on_meta(spec, kernels, 1)
    options = BuildOptions(dtype, torch.device("meta"), 1)
    parameters = allocate(spec, mesh, options)
    if mesh.place.layout.pp > 1:
        _drop_other_stages(module, parameters)
    untold = set(dict(module.named_parameters())) ^ set(parameters)
    tied = {name for name, _ in spec.family.table.tied if "tied" in spec.facts.flags}
    assert untold <= tied, f"the rule table and the module disagree on {sorted(untold)[:20]}"
    place_parameters(module, parameters, spec)
    set_trainable(module, False)
    apply_rules(module, spec.family.table, spec.facts, mesh)
    return module, sum(t.numel() * t.element_size() for t in parameters.values())


def _drop_other_stages(module: Any, held: Mapping[str, Tensor]) -> None:
    """Puts nothing in the place of layers and units of which this stage holds no parameter."""
    words = [name.split(".") for name in held]
    units = {word[0] for word in words}
    layers = {int(word[1]) for word in words if word[0] == "layers"}
    for name, child in list(module.named_children()):
        if name not in units and any(True for _ in child.parameters()):
            setattr(module, name, nn.Identity())
    for index in range(len(module.layers)):
        if index not in layers:
            module.layers[index] = nn.Identity()


def unpack_experts(module: nn.Module, dtype: torch.dtype) -> None:
    """Swaps MXFP4 experts in place for float ones of the same values: codes have no gradient."""
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, Mxfp4Experts):
                setattr(owner, name, to_dense(child, dtype))


def set_trainable(module: nn.Module, trainable: bool) -> None:
    """Turns gradients of all float parameters on or off, and the module's own mode with them."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(trainable)
    module.train(trainable)


def build_on_meta(spec: ModelSpec, kernels: KernelSet, num_positions: int) -> nn.Module:
    """Returns the family's module with shapes but no storage."""
    with torch.device("meta"), _NoInitialValues():
        module: nn.Module = spec.family.builder()(spec.config, kernels, num_positions)
    return module


class _NoInitialValues(TorchFunctionMode):
    """Leaves out the random values that torch's own modules begin with: every one is loaded.

    Without storage there is nothing to draw, yet torch would load its compiler for it: a second
    and 100 MB of each rank's start.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def allocate(
    spec: ModelSpec, mesh: Mesh, options: BuildOptions, names: Container[str] | None = None
) -> dict[str, Tensor]:
    """Returns uninitialised tensors, by parameter name, of the shapes this rank holds: all of
    them, or those of some names.

    They have the compute dtype unless their rule keeps another; local experts are stacked.
    """
    kept = kept_types(spec)
    return {
        name: torch.empty(
            shape,
            dtype=TORCH_TYPES[kept[name]] if name in kept else options.dtype,
            device=options.device,
        )
        for name, shape in parameter_shapes(spec, mesh.place).items()
        if names is None or name in names
    }


def install(module: nn.Module, parameters: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Puts tensors in the place of the module's parameters, tied ones shared.

    Asserts that none is left without storage: the rule table and the module must agree.
    """
    place_parameters(module, parameters, spec)
    empty = [n for n, p in module.named_parameters() if p.is_meta]
    assert not empty, f"parameters the rule table of {spec.family.name} does not name: {empty}"


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves what is computed rather than loaded (rotary tables) to the device."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def planned_bytes(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype) -> int:
    """Returns the bytes of weights the rules give to this rank."""
    return held_bytes(spec.tensors, spec.facts, mesh.place, element_bytes=dtype.itemsize)


def place_parameters(module: nn.Module, parameters: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Puts tensors in the place of some of the module's parameters, tied ones shared."""
    for name, tensor in parameters.items():
        _set_parameter(module, name, nn.Parameter(tensor, requires_grad=False))
    if "tied" in spec.facts.flags:
        present = dict(module.named_parameters())
        for name, shared in spec.family.table.tied:
            if name not in present or shared not in present:
                continue  # another pipeline stage has it
            _set_parameter(module, name, module.get_parameter(shared))


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    assert leaf in owner._parameters, f"the module has no parameter {name}"
    owner._parameters[leaf] = parameter
