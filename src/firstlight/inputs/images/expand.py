"""Owns making room in a prompt for image features: each placeholder is repeated to their number.
It knows token ids and positions alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.inputs.images.load import PreparedImage


@dataclass(frozen=True)
class PlacedImage:
    """An image behind the placeholder tokens [first, first + count) of an expanded prompt.

    `digest`, `grid` and `patches` are those of the prepared image.
    """

    first: int
    count: int
    digest: str
    grid: tuple[int, int, int]
    patches: bytes


def expand_images(
    token_ids: Sequence[int], image_positions: Sequence[int], images: Sequence[PreparedImage]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Repeats the single placeholder at each of `image_positions` (rising) to its image's tokens.

    Returns the expanded ids and where each image stands in them.
    """
    assert len(image_positions) == len(images), "a placeholder has no image, or an image none"
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    done = 0
    for position, image in zip(image_positions, images, strict=True):
        assert done <= position < len(token_ids), f"placeholder {position} is out of order"
        expanded += token_ids[done:position]
        plan = image.plan
        placed.append(
            PlacedImage(len(expanded), plan.num_tokens, image.digest, plan.grid, image.patches)
        )
        expanded += [token_ids[position]] * plan.num_tokens
        done = position + 1
    expanded += token_ids[done:]
    return expanded, tuple(placed)
