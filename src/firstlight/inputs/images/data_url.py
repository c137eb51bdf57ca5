"""Owns reading the bytes out of a `data:` URL; what they hold is somebody else's matter.
It refuses everything but base64 of an image type.
"""

import base64
import binascii

from firstlight.inputs.images.policy import ImagePolicy, image_error, too_many_bytes

SCHEME = "data:"
_FORM = "write data:image/png;base64,... with the bytes of a PNG, JPEG, WebP, GIF or BMP"
_WHITESPACE = {ord(character): None for character in " \t\r\n"}


def data_url_bytes(url: str, policy: ImagePolicy, where: str) -> bytes:
    """Returns the bytes of a data URL, at most `policy.max_bytes`. Raises RequestError."""
    head, comma, text = url[len(SCHEME) :].partition(",")
    media_type, *parameters = (part.strip().lower() for part in head.split(";"))
    if not comma or "base64" not in parameters:
        raise image_error(where, f"is no base64 data URL; {_FORM}", "invalid_image_url")
    if not media_type.startswith("image/"):
        raise image_error(
            where, f"is a data URL of type {media_type[:80]!r}; {_FORM}", "invalid_image_url"
        )
    text = text.translate(_WHITESPACE)
    if len(text) // 4 * 3 - 2 > policy.max_bytes:
        raise too_many_bytes(policy, where)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise image_error(where, f"is not valid base64: {error}", "invalid_image_url") from None
    if len(data) > policy.max_bytes:
        raise too_many_bytes(policy, where)
    return data
