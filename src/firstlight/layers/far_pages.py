"""Owns how a layer asks for pages that do not lie in its tensors, and the order it reads them in.

Knows no tier, no file and no policy of moving: whoever implements `FarPages` does.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from firstlight.sharding.attention_pattern import SEGMENT_TOKENS

# Positions of one segment are a multiple of this. It is a multiple of the positions every kernel
# takes at once, so that a context gives the same bits whatever its segments are.
SEGMENT_STEP = SEGMENT_TOKENS


class Pending(Protocol):
    """Pages on their way."""

    def wait(self) -> None:
        """Returns when the bytes are in place for the work that is queued next on the device."""
        ...


class FarPages(Protocol):
    """Pages of all layers that lie outside the layers' tensors.

    Page ids are one numbering over all places: those below `first` are pages of the layers'
    tensors, all others are far. Pages of tokens that a step writes are never far.
    """

    @property
    def first(self) -> int:
        """The least page id that is far: the number of pages in a layer's tensors."""
        ...

    def staging(self, layer: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns two sets of buffers of this layer's shapes, to be filled in turn. Layers that
        choose blocks use the first alone, which may be larger; the second is empty then.

        A set holds one tensor for each tensor of the layer's pages, in the order of its state's
        fields (`layer_state.page_tensors`), each [pages, ...] with as many pages as SEGMENT_STEP
        tokens take, or a multiple. All layers may be given the same memory: a layer leaves
        nothing in it.
        """
        ...

    def fetch(self, layer: int, pages: Sequence[int], into: Sequence[Tensor]) -> Pending:
        """Starts to copy far pages, in this order, to the first places of `into`.

        `into` are tensors or slices of a staging set, `into[i][j]` for page `pages[j]`. Nobody
        reads or writes them before `wait`. A page that cannot be read becomes NaN (its scales,
        where pages are INT8): then the rows that see it fail, and no others. Not to be
        called with near pages. Raises nothing that a single page can cause.
        """
        ...
