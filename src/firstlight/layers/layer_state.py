"""Owns the tensors a layer may be handed as its state; knows no allocation policy and no
request.

Pages of a layer may lie outside its tensors: then `far` fetches those of layer `layer`, and page
ids from `far.first` on are its. `summaries` are the highest and the lowest value of each channel
of the keys of a page, for all pages, far ones too, [page ids, kv_heads, 2, head_dim] or [page ids,
2, width] in fp16, for layers that choose blocks: whoever gives a page another id moves its row
along.
"""

from dataclasses import dataclass

from torch import Tensor

from firstlight.layers.far_pages import FarPages


@dataclass(frozen=True)
class PagedKeysValues:
    """Keys and values of one layer in pages: [pages, kv_heads, page_size, head_dim] each.

    `group` is the index of the cache group whose page tables in PackedBatch belong to this layer.
    """

    keys_PKSH: Tensor
    values_PKSH: Tensor
    group: int
    far: FarPages | None = None
    layer: int = 0
    summaries: Tensor | None = None


@dataclass(frozen=True)
class PagedLatents:
    """Latent rows of one layer in pages, shared by all heads: [pages, page_size, width].

    Page tables are as for PagedKeysValues.
    """

    rows_PSW: Tensor
    group: int
    far: FarPages | None = None
    layer: int = 0
    summaries: Tensor | None = None


@dataclass(frozen=True)
class QuantisedKeysValues:
    """PagedKeysValues in INT8 or FP8, with an fp16 scale for each token and head: [pages, kv_heads,
    page_size]. A value is its code times its scale.
    """

    keys_PKSH: Tensor
    key_scales_PKS: Tensor
    values_PKSH: Tensor
    value_scales_PKS: Tensor
    group: int
    far: FarPages | None = None
    layer: int = 0
    summaries: Tensor | None = None


@dataclass(frozen=True)
class QuantisedLatents:
    """PagedLatents in INT8 or FP8, with an fp16 scale for each token and 64 values of its row:
    [pages, page_size, scales].
    """

    rows_PSW: Tensor
    scales_PSG: Tensor
    group: int
    far: FarPages | None = None
    layer: int = 0
    summaries: Tensor | None = None


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


KeysValues = PagedKeysValues | QuantisedKeysValues
Latents = PagedLatents | QuantisedLatents
PagedState = KeysValues | Latents
LayerState = PagedState | RecurrentSlots


def page_tensors(state: PagedState) -> tuple[Tensor, ...]:
    """Returns the tensors whose first dimension are pages, in the order of the fields."""
    if isinstance(state, PagedKeysValues):
        return state.keys_PKSH, state.values_PKSH
    if isinstance(state, QuantisedKeysValues):
        return state.keys_PKSH, state.key_scales_PKS, state.values_PKSH, state.value_scales_PKS
    if isinstance(state, QuantisedLatents):
        return state.rows_PSW, state.scales_PSG
    return (state.rows_PSW,)
