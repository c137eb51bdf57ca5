"""Digests of all that is kept of a running request, layer by layer, wherever it lies.

Knows no test: equality of two engines' states is what they are for.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from firstlight.layers.layer_state import RecurrentSlots, page_tensors
from local_engine import LocalEngine


@torch.inference_mode()
def state_digests(engine: LocalEngine, request_id: str) -> dict[str, str]:
    """Returns a digest of each layer's recurrent state, or of its full pages in token order."""
    request = engine.scheduler._requests[request_id]
    tables, tokens = engine.cache.blocks(request), request.num_computed
    found = {}
    for index, state in enumerate(engine.states):
        digest, table = blake3(), tables[state.group]
        if isinstance(state, RecurrentSlots):
            for tensor in (state.matrices_RHKV, state.inputs_RTC):
                digest.update(_bytes(tensor[table[0]]))
        else:
            page_tokens = page_tensors(state)[0].shape[-2]
            for unit in table[: tokens // page_tokens]:
                for data in _page(engine, state, unit):
                    digest.update(data)
        found[f"{index} {type(state).__name__}"] = digest.hexdigest()
    return found


def _page(engine: LocalEngine, state: Any, unit: int) -> Iterator[Any]:
    """What a page holds, its summary left out: far ones are read through the store, which compares
    their checksums.
    """
    near = page_tensors(state)
    if unit < near[0].shape[0]:
        yield from (_bytes(tensor[unit]) for tensor in near)
        return
    buffer = np.empty(engine.tiers.layer_bytes(state.group, state.layer), np.uint8)
    data = engine.tiers.read_layer(state.group, unit, state.layer, buffer)
    assert data is not None, "a page outside the device cannot be read"
    yield np.ascontiguousarray(data[: sum(tensor[0].nbytes for tensor in near)])


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
