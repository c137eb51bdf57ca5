"""Owns the one computation of a picture's size: resized, padded, patch grid and number of tokens.
It knows no pixel; prompt and patches both follow what it says.
"""

import math
from typing import NamedTuple

from firstlight.inputs.images.preprocess_settings import PreprocessSettings


class ImagePlan(NamedTuple):
    """Sizes of a picture on its way to the encoder; (width, height) in pixels.

    `grid` is (frames, rows, columns) of patches of the padded picture, `num_tokens` the features
    the encoder makes of it, which is also the number of placeholder tokens.
    """

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int, int]
    num_tokens: int


def plan_image(width: int, height: int, settings: PreprocessSettings) -> ImagePlan:
    """Plans a picture of width x height pixels, both at least 1.

    It is shrunk, never enlarged, until its whole patches and each side respect their limits, then
    padded to whole tokens. Padding is not counted against `max_patches`, as in the rule the model
    was trained with.
    """
    assert width >= 1 and height >= 1, f"a picture of {width} x {height} pixels"
    resized = _resized(width, height, settings)
    unit = settings.token_pixels
    columns, rows = (-(-side // unit) for side in resized)
    merge = settings.merge_size
    return ImagePlan(
        resized=resized,
        padded=(columns * unit, rows * unit),
        grid=(1, rows * merge, columns * merge),
        num_tokens=rows * columns,
    )


def _resized(width: int, height: int, settings: PreprocessSettings) -> tuple[int, int]:
    patch, longest = settings.patch_size, settings.max_side_pixels
    whole_patches = max(1, width // patch) * max(1, height // patch)
    scale = min(
        1.0, math.sqrt(settings.max_patches / whole_patches), longest / width, longest / height
    )
    return (
        min(max(1, int(width * scale)), longest),
        min(max(1, int(height * scale)), longest),
    )
