"""Owns how a rank's store of units outside the device is made from what the engine orders."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firstlight.cache.far_pool import FarSizes
from firstlight.layers.layer_state import LayerState, RecurrentSlots, page_tensors
from firstlight.runner.disk_tier import DiskTier
from firstlight.runner.far_reader import FarReader
from firstlight.runner.host_tier import HostTier
from firstlight.runner.protocol import AllocateCaches, RankSettings
from firstlight.runner.tier_store import TierStore
from firstlight.runner.unit_bytes import GroupUnits
from firstlight.runner.unit_places import GroupPlaces


def open_tiers(
    states: Sequence[LayerState],
    order: AllocateCaches,
    settings: RankSettings,
    *,
    weights: str,
) -> tuple[TierStore | None, tuple[LayerState, ...]]:
    """Returns the store behind these layer states, None when nothing is to lie outside the device;
    and the states, whose paged ones can read what it holds.

    Raises EnvironmentProblem when the folder of the disk tier cannot hold it.
    """
    layout = {
        "weights": weights,
        "rank": settings.rank,
        "tp": settings.tp,
        "block_size": settings.block_size,
        "kv_dtype": settings.kv_dtype,
    }
    sizes = [FarSizes(*pair) for pair in order.far]
    return make_store(states, sizes, folder=order.tier_folder, layout=layout)


def make_store(
    states: Sequence[LayerState],
    sizes: Sequence[FarSizes],
    *,
    folder: str,
    layout: Mapping[str, Any],
) -> tuple[TierStore | None, tuple[LayerState, ...]]:
    """Does the same for so many units of each cache group. `layout` says whose state it is, with
    the tokens of a page as `block_size`; how units are made up is added here.
    """
    if not sizes:
        return None, tuple(states)
    found = [_with_far_summaries(state, sizes[state.group]) for state in states]
    groups: list[GroupPlaces] = []
    first_byte = 0
    for index, size in enumerate(sizes):
        units = GroupUnits([state for state in found if state.group == index])
        host = HostTier(size.host, units.unit_bytes, pinned=not units.is_host)
        groups.append(GroupPlaces(units, size, host, first_byte))
        first_byte += size.disk * units.unit_bytes
    disk = None
    if first_byte:
        described = {**layout, "groups": [_describe(group.units) for group in groups]}
        disk = DiskTier(Path(folder), first_byte, described)
    store = TierStore(groups, disk)
    return store, _with_far_pages(found, store, page_tokens=layout["block_size"])


def _with_far_pages(
    states: Sequence[LayerState], store: TierStore, *, page_tokens: int
) -> tuple[LayerState, ...]:
    found = list(states)
    for group in {state.group for state in states}:
        paged = [
            (index, state)
            for index, state in enumerate(states)
            if state.group == group and not isinstance(state, RecurrentSlots)
        ]
        if paged:
            tensors = [page_tensors(state) for _, state in paged]
            chooses = any(state.summaries is not None for _, state in paged)
            reader = FarReader(store, group, tensors, page_tokens=page_tokens, chooses=chooses)
            for number, (index, state) in enumerate(paged):
                found[index] = replace(state, far=reader, layer=number)
    return tuple(found)


def _with_far_summaries(state: LayerState, size: FarSizes) -> LayerState:
    """What layers choose pages by stays on the device, of far pages too."""
    if isinstance(state, RecurrentSlots) or state.summaries is None:
        return state
    near = state.summaries
    summaries = near.new_empty((near.shape[0] + size.host + size.disk, *near.shape[1:]))
    return replace(state, summaries=summaries)


def _describe(units: GroupUnits) -> list[Any]:
    """What one unit holds of every layer; layers that are alike are said once."""
    layers = [[[str(t.dtype), list(t.shape[1:])] for t in layer] for layer in units.layers]
    return [len(layers), [layer for n, layer in enumerate(layers) if layer not in layers[:n]]]
