"""Owns turning the bytes of a picture file into pixels, refusing what should not be decoded.
It knows nothing of where the bytes came from or what becomes of the pixels.

Pictures stay as they are stored: an orientation noted beside them (EXIF) is not applied, because
the model's own preprocessing does not apply it either. Of 16-bit gray pictures the upper 8 bits
count, of cameras' multi-picture files the first picture.
"""

import io
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from firstlight.errors import RequestError
from firstlight.inputs.images.policy import ImagePolicy, image_error

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_SUPPORTED = "PNG, JPEG, WebP, GIF or BMP"
# A progressive JPEG may repeat its passes over all pixels at a few bytes each; cameras and editors
# write about ten.
MAX_PASSES = 64
_PASS_MARKER = b"\xff\xda"
# A JPEG of a camera with further views behind the first one.
_SEVERAL_VIEWS = "MPO"
_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_DEEP_GRAY = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I"})

T = TypeVar("T")


def open_image(data: bytes, policy: ImagePolicy, where: str) -> Image.Image:
    """Reads the header of a picture and checks it; nothing is decoded yet.

    Raises RequestError for an empty, unknown, broken, animated or too large one.
    """
    if not data:
        raise image_error(where, "is empty")
    if data.startswith(b"\xff\xd8") and data.count(_PASS_MARKER) > MAX_PASSES:
        raise image_error(where, f"is a JPEG of more than {MAX_PASSES} passes")
    image = _guarded(lambda: Image.open(io.BytesIO(data), formats=FORMATS), where)
    width, height = image.size
    if width < 1 or height < 1:
        raise image_error(where, f"has no pixels: {width} x {height}")
    if width * height > policy.max_pixels:
        raise image_error(
            where,
            f"has {width} x {height} pixels, more than the {policy.max_pixels} taken here",
            "image_too_large",
        )
    if image.format != _SEVERAL_VIEWS and _guarded(
        lambda: getattr(image, "is_animated", False), where
    ):
        raise image_error(where, "is animated; send one still picture")
    if image.mode not in _MODES | _DEEP_GRAY:
        raise image_error(where, f"has pixels of kind {image.mode}, which are not read here")
    return image


def decode_image(image: Image.Image, where: str) -> Image.Image:
    """Decodes an opened picture completely. Raises RequestError when it is broken or cut short."""
    _guarded(image.load, where)
    if image.mode not in _DEEP_GRAY:
        return image
    levels = np.asarray(image).astype(np.int64).clip(0, 65535) >> 8
    return Image.fromarray(levels.astype(np.uint8))


def _guarded(work: Callable[[], T], where: str) -> T:
    """Decoders meet hostile bytes here, and answer with exceptions of nearly every type."""
    try:
        return work()
    except UnidentifiedImageError:
        raise image_error(where, f"is no picture in a format read here: {_SUPPORTED}") from None
    except Image.DecompressionBombError:
        raise image_error(where, "has more pixels than are taken here", "image_too_large") from None
    except RequestError:
        raise
    except Exception as error:
        raise image_error(where, f"is broken or cut short: {error}") from error
