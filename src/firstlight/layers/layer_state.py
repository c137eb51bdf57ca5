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


@dataclass(frozen=True)
class PagedLatents:
    """Latent rows of one layer in pages, shared by all heads: [pages, page_size, width].

    Page tables are as for PagedKeysValues.
    """

    rows_PSW: Tensor
    group: int


@dataclass(frozen=True)
class RecurrentSlots:
    """Recurrent state of one layer by slot: fp32 matrices [slots, heads, key_dim, value_dim], and
    the last inputs of the short convolutions [slots, taps - 1, channels], oldest first.

    The table of `group` in PackedBatch holds one slot a sequence, [B, 1]. A sequence whose tokens
    begin at position 0 starts from zeros, whatever its slot holds.
    """

    matrices_RHKV: Tensor
    inputs_RTC: Tensor
    group: int


LayerState = PagedKeysValues | PagedLatents | RecurrentSlots
