"""Owns the features of images on one rank: made once, found again by content, within a budget.

Knows no request and no step. Rows keep the features they still need themselves, so an eviction
costs at most another encoding. Shape letters: N patches, C channels, P pixels along a patch, M
tokens of an image, D model width.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstlight.layers.pixel_levels import normalise_pixels
from firstlight.runner.rows import RowImage

Grid = tuple[int, int, int]
Encode = Callable[[Tensor, Sequence[Grid]], list[Tensor]]
_CHANNELS = 3


class EncodingFailed(Exception):
    """An image has no usable features; the message is the reason its request is given."""


@dataclass(frozen=True)
class ImageEncoder:
    """A model's encoder as this rank runs it: `encode(pixels_NCPP, grids)` gives [M, D] each."""

    encode: Encode
    device: torch.device
    dtype: torch.dtype

    def features(self, image: RowImage) -> Tensor:
        """Encodes one image. Raises EncodingFailed unless it gives finite features for each token.

        Running out of memory ends the image and not the rank: what it took is free again.
        """
        levels_NCPP = _levels(image)
        try:
            pixels_NCPP = normalise_pixels(levels_NCPP.to(self.device), self.dtype)
            (features_MD,) = self.encode(pixels_NCPP, [image.grid])
        except (RuntimeError, ValueError, MemoryError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise EncodingFailed(f"the image encoder failed: {reason}") from error
        if len(features_MD) != image.count:
            raise EncodingFailed(
                f"the image encoder made {len(features_MD)} features for {image.count} tokens"
            )
        if not bool(features_MD.isfinite().all()):  # host sync, once an image
            raise EncodingFailed(
                "the image encoder produced numbers that are not finite (NaN or infinity)"
            )
        return features_MD


class EncoderCache:
    """Features by digest, the least recently used going first when `budget_bytes` are exceeded."""

    def __init__(self, encoder: ImageEncoder, *, budget_bytes: int) -> None:
        self._encoder = encoder
        self._budget_bytes = budget_bytes
        self._features: OrderedDict[str, Tensor] = OrderedDict()
        self.used_bytes = 0
        self.num_encoded = 0
        self.num_found = 0

    def features(self, image: RowImage) -> Tensor:
        """Returns the features [M, D] of an image of a row, encoding it if nobody has them.

        Raises EncodingFailed; nothing of the image is kept then.
        """
        found_MD = self._features.get(image.digest)
        if found_MD is not None:
            self._features.move_to_end(image.digest)
            self.num_found += 1
            return found_MD
        features_MD = self._encoder.features(image)
        self.num_encoded += 1
        self._keep(image.digest, features_MD)
        return features_MD

    def clear(self) -> None:
        """Forgets all features: another encoder made them."""
        self._features.clear()
        self.used_bytes = 0

    def check_integrity(self) -> None:
        """Recounts the bytes; for tests and idle moments."""
        assert self.used_bytes == sum(f.nbytes for f in self._features.values())
        assert self.used_bytes <= self._budget_bytes, "more features are kept than the budget has"

    def _keep(self, digest: str, features_MD: Tensor) -> None:
        if features_MD.nbytes > self._budget_bytes:
            return  # would drive out all others and still not fit
        self._features[digest] = features_MD
        self.used_bytes += features_MD.nbytes
        while self.used_bytes > self._budget_bytes:
            _, evicted = self._features.popitem(last=False)
            self.used_bytes -= evicted.nbytes


def _levels(image: RowImage) -> Tensor:
    """Patches as uint8 [N, C, P, P] on the CPU."""
    num_patches = math.prod(image.grid)
    side = math.isqrt(len(image.patches) // max(1, num_patches * _CHANNELS))
    if side < 1 or num_patches * _CHANNELS * side * side != len(image.patches):
        raise EncodingFailed(
            f"{len(image.patches)} bytes of pixels do not fit a grid of {image.grid}"
        )
    levels = torch.frombuffer(bytearray(image.patches), dtype=torch.uint8)
    return levels.view(num_patches, _CHANNELS, side, side)
