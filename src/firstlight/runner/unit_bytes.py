"""Owns the bytes of one page or slot of a cache group: how all its layers lie one behind the other.

Knows no place outside the device and no policy. A row is a unit's bytes, layer by layer, and within
a layer tensor by tensor in the order of its state's fields.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firstlight.layers.layer_state import LayerState, RecurrentSlots, page_tensors

Row = NDArray[np.uint8]


class GroupUnits:
    """The units of one group on the device; `states` are those of its layers, in order."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.layers = [unit_tensors(state) for state in states]
        summaries = [getattr(state, "summaries", None) for state in states]
        self._summaries = [tensor for tensor in summaries if tensor is not None]
        self.is_host = self.layers[0][0].device.type == "cpu"
        # On the host a tensor is seen as rows of bytes, without a copy.
        layers = self.layers if self.is_host else []
        self._views = [[_as_bytes(tensor) for tensor in layer] for layer in layers]
        self.layer_sizes = [sum(t[0].nbytes for t in layer) for layer in self.layers]
        self.unit_bytes = sum(self.layer_sizes)

    @property
    def num_units(self) -> int:
        """Units on the device."""
        return int(self.layers[0][0].shape[0])

    def spans(self) -> list[slice]:
        """Where each layer lies in a row."""
        ends = np.cumsum(self.layer_sizes).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.layer_sizes, strict=True)]

    def copy_summaries(self, source: int, target: int) -> None:
        """Gives what layers choose a page by to its new number, where that is on the device."""
        for tensor in self._summaries:
            tensor[target] = tensor[source]

    def read(self, unit: int, row: Row) -> None:
        """Copies a unit into a row."""
        first = 0
        for index, layer in enumerate(self.layers):
            for place, tensor in enumerate(layer):
                if self.is_host:
                    data = self._views[index][place][unit]
                else:
                    data = tensor[unit].reshape(-1).view(torch.uint8).cpu().numpy()
                row[first : first + data.size] = data
                first += data.size

    def write(self, unit: int, row: Row) -> None:
        """Copies a row into a unit."""
        first = 0
        for index, layer in enumerate(self.layers):
            for place, tensor in enumerate(layer):
                if self.is_host:
                    view = self._views[index][place][unit]
                    view[:] = row[first : first + view.size]
                    first += view.size
                else:
                    first += _fill(tensor[unit], row[first:])


def unit_tensors(state: LayerState) -> tuple[Tensor, ...]:
    """Returns the tensors of a layer whose first dimension are pages or slots."""
    if isinstance(state, RecurrentSlots):
        return state.matrices_RHKV, state.inputs_RTC
    summaries = () if state.summaries is None else (state.summaries,)
    return (*page_tensors(state), *summaries)


def fill_tensors(tensors: Sequence[Tensor], row: Row) -> None:
    """Copies one layer's part of a row into one page of each of its tensors."""
    first = 0
    for tensor in tensors:
        first += _fill(tensor, row[first:])


def _fill(tensor: Tensor, row: Row) -> int:
    size = tensor.nbytes
    data = torch.from_numpy(row[:size]).view(tensor.dtype)
    tensor.copy_(data.view(tensor.shape))
    return size


def _as_bytes(tensor: Tensor) -> Any:
    assert tensor.is_contiguous(), "pages do not lie one behind the other"
    return tensor.reshape(tensor.shape[0], -1).view(torch.uint8).numpy()
