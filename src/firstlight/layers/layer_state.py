"""Owns the tensors a layer may be handed as its state; knows no allocation policy and no
request.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PagedKeysValues:
    """Keys and values of one layer in pages: [pages, kv_heads, page_size, head_dim] each.

    `group` is the index of the cache group whose page tables in PackedBatch belong to this layer.
    """

    keys_PKSH: Tensor
    values_PKSH: Tensor
    group: int


LayerState = PagedKeysValues
