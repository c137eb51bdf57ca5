"""Owns the choice of layers that stay at higher precision: measured on sample tokens, by a budget.

Each layer runs twice on the same exact input, with its own weights and with what the codec leaves
of them; layers that stray most for the bytes they cost are kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firstlight.adapt.quantise import encode
from firstlight.adapt.shard_plan import quantises
from firstlight.assembly.build import build_on_meta, move_buffers
from firstlight.checkpoint.codec_values import decode_matrix
from firstlight.checkpoint.store import LayerError, PrecisionRecord
from firstlight.kernels.builtin import reference_kernels
from firstlight.layers.packed_batch import pack_whole
from firstlight.models.spec import ModelSpec
from firstlight.sharding.codecs import Codec


class _Cost(NamedTuple):
    """Bytes of a layer's matrices that a codec takes: as they are, and coded."""

    plain: int
    coded: int


class PrecisionMeter:
    """Measures the error of every layer; give it all units in load order with `on_unit`.

    Only the current unit is held. Arithmetic is float32 with the reference kernels.
    """

    def __init__(self, spec: ModelSpec, codec: Codec, samples: Mapping[str, Sequence[int]]) -> None:
        self._spec, self._codec = spec, codec
        self._samples = {name: list(ids) for name, ids in samples.items()}
        longest = max(len(ids) for ids in self._samples.values())
        self._module: Any = build_on_meta(spec, reference_kernels(), longest)
        move_buffers(self._module, torch.device("cpu"))
        self._batch = pack_whole([len(ids) for ids in self._samples.values()])
        self._coded = {r.name for r in spec.tensors if quantises(codec, r, spec.facts)}
        self._carry: Any = None
        self._errors: dict[int, float] = {}
        self._costs: dict[int, _Cost] = {}

    @torch.inference_mode()
    def on_unit(self, unit: str, tensors: Mapping[str, Tensor]) -> None:
        """Runs the sample through one unit; `tensors` are its parameters by our names."""
        if unit == "embed":
            tokens_T = torch.tensor([t for ids in self._samples.values() for t in ids])
            self._install(tensors)
            self._carry = self._module.start(tokens_T, self._batch)
        elif unit.startswith("layer-"):
            number = int(unit.removeprefix("layer-"))
            layer = self._module.layers[number]
            self._install(self._strayed(tensors))
            strayed = layer(self._carry, self._batch)
            self._install(tensors)
            exact = layer(self._carry, self._batch)
            self._errors[number] = _relative_error(self._carry, exact, strayed)
            self._costs[number] = self._cost(tensors)
            self._carry = exact
        for name, tensor in tensors.items():
            self._set(name, torch.empty(tensor.shape, device="meta"))

    def choose(self, budget: float) -> PrecisionRecord:
        """Returns which layers stay as they are. `budget` is the share, from 0 to 1, of the bytes
        the codec would save that may be given up for them."""
        order = sorted(self._errors, key=lambda n: self._errors[n] / self._extra(n), reverse=True)
        left = budget * sum(self._extra(number) for number in order)
        kept = []
        for number in order:
            if 0 < self._extra(number) <= left:
                kept.append(number)
                left -= self._extra(number)
        return PrecisionRecord(
            codec=self._codec.name,
            budget=budget,
            samples={name: len(ids) for name, ids in self._samples.items()},
            layers=tuple(
                LayerError(number, error, number in kept)
                for number, error in sorted(self._errors.items())
            ),
        )

    def finish(self, store: Any) -> None:
        """Writes nothing: the record goes into the manifest."""

    def _extra(self, layer: int) -> int:
        return max(1, self._costs[layer].plain - self._costs[layer].coded)

    def _strayed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._coded_values(values) if name in self._coded else values
            for name, values in tensors.items()
        }

    def _coded_values(self, values: Tensor) -> Tensor:
        if values.dim() == 3:  # the experts of one parameter, each a matrix of its own
            return torch.stack([self._coded_values(one) for one in values])
        coded = encode(self._codec, values)
        raw = torch.cat([t.contiguous().view(torch.uint8).reshape(-1) for t in coded])
        return torch.from_numpy(decode_matrix(self._codec, raw.numpy(), tuple(values.shape)))

    def _cost(self, tensors: Mapping[str, Tensor]) -> _Cost:
        plain = coded = 0
        for name, values in tensors.items():
            if name in self._coded:
                count = prod(values.shape[:-2])
                plain += values.numel() * values.element_size()
                coded += count * self._codec.matrix_bytes(values.shape[-2:])
        return _Cost(plain, coded)

    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._set(name, tensor.float() if tensor.is_floating_point() else tensor)

    def _set(self, name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self._module.get_submodule(path)
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _relative_error(before: Any, exact: Any, strayed: Any) -> float:
    """Returns how far a layer strays, as a share of what it changes: |strayed - exact| over
    |exact - before|, of all tensors that it changes."""
    off = moved = 0.0
    for old, one, other in zip(_floats(before), _floats(exact), _floats(strayed), strict=False):
        if old.shape == one.shape:
            off += float((other - one).double().square().sum())
            moved += float((one - old).double().square().sum())
    return (off / moved) ** 0.5 if moved else 0.0


def _floats(carry: Any) -> Iterable[Tensor]:
    """Yields the float tensors of what goes from layer to layer."""
    if isinstance(carry, Tensor):
        if carry.is_floating_point():
            yield carry
    elif isinstance(carry, tuple | list):
        for part in carry:
            yield from _floats(part)
