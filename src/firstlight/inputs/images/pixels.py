"""Owns how a decoded picture becomes the patches an encoder reads, exactly as at training.
It knows nothing of files or of normalised numbers: levels stay bytes.

Shape letters: H, W pixels of the padded picture, R, C patches along them, P pixels of a patch,
N = R * C.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from firstlight.inputs.images.preprocess_settings import Chessboard, PreprocessSettings
from firstlight.inputs.images.sizes import ImagePlan

Levels = NDArray[np.uint8]


def image_patches(image: Image.Image, plan: ImagePlan, settings: PreprocessSettings) -> bytes:
    """Returns uint8 patches [N, 3, P, P], row by row, as bytes.

    The picture is resized in its own mode (bicubic; not resampled when its size stays), put over
    the chessboard if it has transparency, and padded with black at the right and at the bottom.
    """
    if image.size != plan.resized:
        image = image.resize(plan.resized, Image.Resampling.BICUBIC)
    width, height = plan.padded
    canvas_HW3 = np.zeros((height, width, 3), np.uint8)
    canvas_HW3[: image.height, : image.width] = _opaque(image, settings.background)
    patch = settings.patch_size
    rows, columns = plan.grid[1:]
    split_RPCP3 = canvas_HW3.reshape(rows, patch, columns, patch, 3)
    patches: bytes = split_RPCP3.transpose(0, 2, 4, 1, 3).tobytes()
    return patches


def _opaque(image: Image.Image, background: Chessboard) -> Levels:
    if not _has_transparency(image):
        return np.asarray(image.convert("RGB"))
    pixels_HW4 = np.asarray(image.convert("RGBA"))
    board_HW1 = _board(image.height, image.width, background)
    alpha_HW1 = pixels_HW4[..., 3:].astype(np.float32) / np.float32(255)
    mixed_HW3 = alpha_HW1 * pixels_HW4[..., :3] + (1 - alpha_HW1) * board_HW1
    levels: Levels = mixed_HW3.astype(np.uint8)  # truncates, as at training
    return levels


def _has_transparency(image: Image.Image) -> bool:
    """An RGB picture with one transparent colour does not count: the reference takes it as it is.

    Gray, bilevel and palette pictures with such a colour do.
    """
    if image.mode == "RGB":
        return False
    return "A" in image.getbands() or "transparency" in image.info


def _board(height: int, width: int, board: Chessboard) -> Levels:
    row_H1 = np.arange(height)[:, None] // board.square
    column_1W = np.arange(width)[None, :] // board.square
    levels = np.array([board.first, board.second], np.uint8)
    board_HW: Levels = levels[(row_H1 + column_1W) % 2]
    return board_HW[..., None]
