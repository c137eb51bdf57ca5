"""Owns copies of pages onto other pages of the same device, in every layer of a cache group.

Takes no decision: plans name sources and targets, in the order in which they must be copied.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from firstlight.layers.layer_state import LayerState
from firstlight.runner.unit_bytes import unit_tensors
from firstlight.schedule.step import UnitCopy

# Bytes of one tensor that are copied at once, and so held twice for a moment.
BYTES_AT_ONCE = 16 * 1024**2

Layer = tuple[Tensor, ...]


def layers_by_group(states: Sequence[LayerState]) -> dict[int, list[Layer]]:
    """Returns the tensors of every layer whose first dimension are pages or slots, by group."""
    found: dict[int, list[Layer]] = {}
    for state in states:
        found.setdefault(state.group, []).append(unit_tensors(state))
    return found


def copy_pages(layers: Mapping[int, Sequence[Layer]], copies: Sequence[UnitCopy]) -> None:
    """Carries out copies as if one by one; what layers choose pages by goes along."""
    for group, sources, targets in _batches(copies):
        tensors = [tensor for layer in layers[group] for tensor in layer]
        device = tensors[0].device
        sources_N = torch.tensor(sources, device=device)
        targets_N = torch.tensor(targets, device=device)
        for tensor in tensors:
            _copy(tensor, sources_N, targets_N)


def _batches(copies: Sequence[UnitCopy]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Copies in their order, as many together as read nothing that an earlier one of them wrote,
    and write nothing twice: (group, sources, targets).
    """
    group, sources, targets, written = 0, list[int](), list[int](), set[int]()
    for copy in copies:
        clashes = copy.source in written or copy.target in written
        if sources and (clashes or copy.group != group):
            yield group, sources, targets
            sources, targets, written = [], [], set()
        group = copy.group
        sources.append(copy.source)
        targets.append(copy.target)
        written.add(copy.target)
    if sources:
        yield group, sources, targets


def _copy(tensor: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
    """The sources of a part are read before its targets are written; no later part reads these."""
    at_once = max(1, BYTES_AT_ONCE // max(1, tensor[0].nbytes))
    for first in range(0, len(sources_N), at_once):
        part = slice(first, first + at_once)
        tensor.index_copy_(0, targets_N[part], tensor.index_select(0, sources_N[part]))
