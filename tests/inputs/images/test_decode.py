"""What pictures are taken, and that each kind of bad one is refused with its part named."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from firstlight.errors import RequestError
from firstlight.inputs.images.decode import decode_image, open_image
from firstlight.inputs.images.policy import ImagePolicy

WHERE = "messages[2].content[1].image_url"
POLICY = ImagePolicy(max_pixels=100_000)


def decoded(data, policy=POLICY):
    return decode_image(open_image(data, policy, WHERE), WHERE)


def refusal(data, policy=POLICY):
    with pytest.raises(RequestError) as caught:
        decoded(data, policy)
    assert caught.value.parameter == WHERE and str(caught.value).startswith(f"{WHERE}: ")
    return caught.value


def png(width, height, body=b"", depth=8, colour=2):
    """A PNG whose header says what it likes."""

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packed = zlib.compress(body)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", packed), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format_is_read(kind, encoded):
    assert features.check("webp")
    image = decoded(encoded(kind=kind))
    assert image.size == (40, 30)
    assert np.abs(np.asarray(image.convert("RGB")).astype(int) - (200, 30, 90)).max() < 12


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "PCX", "PDF", "JPEG2000"])
def test_other_formats_are_refused(kind, encoded):
    assert "PNG, JPEG, WebP, GIF or BMP" in str(refusal(encoded(kind=kind)))


@pytest.mark.parametrize(
    "data", [b"<svg/>", b"\x00" * 64, b"hello", b"\x89PNG\r\n\x1a\n", b"GIF89a"]
)
def test_what_is_no_picture_is_refused(data):
    assert refusal(data).code == "invalid_image"


def test_an_empty_file_is_refused():
    assert "is empty" in str(refusal(b""))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_cut_short_is_refused(kind, encoded):
    noise = np.random.default_rng(1).integers(0, 256, (40, 50, 3), np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    assert decoded(data).size == (50, 40)
    refusal(data[: len(data) // 2])


def test_a_damaged_checksum_is_refused(encoded):
    data = bytearray(encoded())
    data[data.index(b"IDAT") + 8] ^= 0xFF
    refusal(bytes(data))


def test_a_bomb_is_refused_by_its_header():
    problem = refusal(png(9_000, 9_000))
    assert problem.code == "image_too_large" and "9000 x 9000" in str(problem)
    assert refusal(png(2**31 - 1, 2**31 - 1)).code == "image_too_large"
    # The limit is inclusive.
    assert decoded(png(400, 250, b"\0" * (250 * 1201))).size == (400, 250)
    assert refusal(png(401, 250)).code == "image_too_large"


def test_a_bomb_in_other_formats_is_refused_by_its_header(encoded):
    gif = bytearray(encoded(kind="GIF"))
    gif[6:10] = struct.pack("<HH", 60_000, 60_000)
    assert refusal(bytes(gif)).code == "image_too_large"
    bmp = bytearray(encoded(kind="BMP"))
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    assert refusal(bytes(bmp)).code == "image_too_large"


def test_a_picture_without_pixels_is_refused(encoded):
    refusal(png(0, 5))
    bmp = bytearray(encoded(kind="BMP"))
    bmp[18:26] = struct.pack("<ii", 0, 5)
    refusal(bytes(bmp))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(kind, encoded):
    frames = [Image.new("RGB", (20, 20), (shade, 0, 0)) for shade in (0, 120, 250)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
    assert "animated" in str(refusal(data))


def test_a_single_frame_saved_as_an_animation_is_taken(encoded):
    assert decoded(encoded(kind="GIF", save_all=True)).size == (40, 30)


def test_of_a_picture_with_several_views_the_first_is_taken(encoded):
    views = [Image.new("RGB", (20, 20), (shade, 0, 0)) for shade in (10, 200)]
    data = encoded(views[0], "MPO", save_all=True, append_images=views[1:])
    red = np.asarray(decoded(data))[..., 0]
    assert abs(int(red[5, 5]) - 10) < 5


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("L", "JPEG")],
)
def test_uncommon_modes_are_taken(mode, kind, encoded):
    image = decoded(encoded(Image.new("RGB", (16, 16), (255, 255, 255)).convert(mode), kind))
    assert image.mode == mode
    assert np.asarray(image.convert("RGB")).min() > 250


def test_of_16_bit_gray_the_upper_8_bits_count(encoded):
    levels = np.array([[0, 255, 256], [32768, 65280, 65535]], np.uint16)
    image = decoded(encoded(Image.fromarray(levels)))
    assert np.asarray(image).tolist() == [[0, 0, 1], [128, 255, 255]]


def test_16_bit_colour_is_taken():
    row = b"\0" + struct.pack(">6H", 65535, 32768, 256, 0, 255, 65280)
    pixels = np.asarray(decoded(png(2, 1, row, depth=16)).convert("RGB"))
    assert pixels.tolist() == [[[255, 128, 1], [0, 0, 255]]]


def test_an_orientation_note_does_not_turn_the_picture(encoded):
    noted = Image.Exif()
    noted[0x0112] = 6
    assert decoded(encoded(kind="JPEG", exif=noted)).size == (40, 30)


def test_a_jpeg_that_repeats_its_passes_without_end_is_refused(encoded):
    data = encoded(Image.linear_gradient("L"), "JPEG", progressive=True)
    assert decoded(data).size == (256, 256)
    last = data.rindex(b"\xff\xda")
    scan, end = data[last:-2], data[-2:]
    assert decoded(data[:-2] + scan * 40 + end).size == (256, 256)
    assert "passes" in str(refusal(data[:-2] + scan * 100 + end))


def test_packed_text_in_a_png_does_not_unfold_without_limit(encoded):
    data = encoded()
    packed = zlib.compress(b"a" * 50_000_000)
    body = b"zTXt" + b"k\0\0" + packed
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    refusal(data[:33] + chunk + data[33:])


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), data=st.data())
def test_damaged_files_are_decoded_or_refused_and_nothing_else(kind, data):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((24, 24)).save(file, kind)
    content = bytearray(file.getvalue())
    places = st.integers(0, len(content) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=6)):
        content[place] = value
    try:
        image = decoded(bytes(content))
    except RequestError as problem:
        assert problem.parameter == WHERE
    else:
        assert image.width * image.height <= POLICY.max_pixels
