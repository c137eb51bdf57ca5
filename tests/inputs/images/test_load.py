"""Parts of a request to prepared images: data URLs, limits, sharing, a free event loop."""

import asyncio
import base64
import threading

import pytest
from PIL import Image

from firstlight.errors import RequestError
from firstlight.inputs.images.load import ImagePart
from firstlight.inputs.images.policy import ImagePolicy, parse_hosts

WHERE = "messages[0].content[0].image_url"


async def refusal(loader, *parts):
    with pytest.raises(RequestError) as caught:
        await loader.load(parts)
    assert str(caught.value).startswith(f"{caught.value.parameter}: ")
    return caught.value


async def test_original_size_plan_and_digest_come_with_the_patches(loader, part, encoded):
    (image,) = await loader().load([part(encoded())])
    assert (image.width, image.height) == (40, 30)
    assert image.plan.grid == (1, 4, 4) and image.plan.num_tokens == 4
    assert len(image.patches) == 16 * 3 * 14 * 14
    (again,) = await loader().load([part(encoded(kind="BMP"))])
    assert again.digest == image.digest and len(image.digest) == 64
    (other,) = await loader().load([part(encoded(Image.new("RGB", (40, 30))))])
    assert other.digest != image.digest


async def test_the_grid_is_part_of_the_digest(loader, part, encoded):
    black = [encoded(Image.new("RGB", size)) for size in ((56, 28), (28, 56))]
    wide, high = await loader().load([part(data) for data in black])
    assert wide.patches == high.patches and wide.digest != high.digest


async def test_equal_pictures_of_a_request_share_their_patches(loader, part, encoded):
    images = await loader().load(
        [part(encoded()), part(encoded(kind="BMP"), 1), part(encoded(), 2)]
    )
    assert images[0].patches is images[1].patches is images[2].patches


async def test_order_is_that_of_the_parts(loader, part, encoded):
    sizes = [(90, 20), (10, 10), (50, 70)]
    images = await loader().load(
        [part(encoded(Image.new("RGB", size)), i) for i, size in enumerate(sizes)]
    )
    assert [(image.width, image.height) for image in images] == sizes
    assert await loader().load([]) == []


@pytest.mark.parametrize(
    "head", ["data:image/jpeg;base64,", "DATA:IMAGE/PNG;Base64,", "data:image/x-odd;a=b;base64,"]
)
async def test_content_decides_not_the_declared_type(loader, encoded, head):
    url = head + base64.b64encode(encoded()).decode()
    assert (await loader().load([ImagePart(url, WHERE)]))[0].width == 40
    wrapped = url[:60] + "\r\n" + url[60:] + "\n"
    assert (await loader().load([ImagePart(wrapped, WHERE)]))[0].width == 40


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,iVBORw0KGgo",  # padding is missing
        "data:image/png;base64,****",
        "data:image/png;base64,aGVsbG8_",  # the other alphabet
        "data:image/png,hello",
        "data:image/png;base64",
        "data:text/html;base64,aGVsbG8=",
        "data:;base64,aGVsbG8=",
        "data:",
        "data",
        "",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "/etc/passwd",
        "../secret.png",
        "ftp://127.0.0.1/x.png",
        "gopher://127.0.0.1/",
        "blob:abc",
        "http",
        "data:image/png;base64,\u00e9\u00e9\u00e9\u00e9",
    ],
)
async def test_what_is_no_picture_url_is_refused(loader, part, url):
    problem = await refusal(loader(allowed_hosts=("*",)), part(url))
    assert problem.code == "invalid_image_url" and problem.parameter == WHERE


async def test_an_empty_data_url_is_refused(loader, part):
    assert "is empty" in str(await refusal(loader(), part("data:image/png;base64,")))


async def test_the_part_at_fault_is_named(loader, part, encoded):
    problem = await refusal(loader(), part(encoded()), part(b"junk", 1), part(b"", 2))
    assert problem.parameter == "messages[0].content[1].image_url"


async def test_limits_of_bytes_images_and_tokens(loader, part, encoded):
    data = encoded()
    exact = loader(max_bytes=len(data), max_images=2, max_tokens=8)
    assert len(await exact.load([part(data)])) == 1
    assert (await refusal(loader(max_bytes=len(data) - 1), part(data))).code == "image_too_large"
    assert (await refusal(loader(max_bytes=10), part(data))).code == "image_too_large"
    three = [part(encoded(Image.new("RGB", (40, 30 + i))), i) for i in range(3)]
    problem = await refusal(exact, *three)
    assert problem.code == "too_many_images" and "content[2]" in str(problem)
    assert len(await exact.load(three[:2])) == 2
    assert (await refusal(loader(max_tokens=11), *three)).code == "context_length_exceeded"


async def test_http_is_refused_when_fetching_is_off(loader, part):
    for url in ("http://example.org/a.png", "HTTPS://example.org/a.png"):
        assert (await refusal(loader(), part(url))).code == "image_fetch_refused"


async def test_the_event_loop_turns_while_a_picture_is_decoded(loader, part, encoded, monkeypatch):
    """The decoder waits for a signal that only the running loop can give."""
    signal = threading.Event()
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, *a, **k: (signal.wait(20), resize(self, *a, **k))[1]
    )
    loading = asyncio.create_task(loader().load([part(encoded(Image.new("RGB", (600, 600))))]))
    await asyncio.sleep(0.05)
    assert not loading.done()
    signal.set()
    assert (await loading)[0].width == 600


def test_a_policy_fetches_nothing_unless_hosts_are_given():
    assert not ImagePolicy().fetches
    assert ImagePolicy(allowed_hosts=parse_hosts("a.example, *.b.example:8080")).fetches
