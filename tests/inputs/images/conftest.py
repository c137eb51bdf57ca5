import asyncio
import base64
import contextlib
import dataclasses
import io
from pathlib import Path

import pytest
from PIL import Image

from firstlight.inputs.images.load import ImageLoader, ImagePart
from firstlight.inputs.images.policy import ImagePolicy
from firstlight.inputs.images.preprocess_settings import read_preprocess_settings

K3 = Path(__file__).parents[2] / "data" / "k3"


@pytest.fixture(scope="session")
def k3_data():
    return K3


@pytest.fixture(scope="session")
def mini():
    """Settings of the miniature: the real ones with small limits."""
    settings = read_preprocess_settings(K3 / "checkpoint")
    assert settings is not None
    return settings


@pytest.fixture(scope="session")
def real(mini):
    return dataclasses.replace(mini, max_patches=65536, max_side_patches=512)


@pytest.fixture
def encoded():
    """Bytes of a picture file in a format."""

    def encode(image=None, kind="PNG", **options):
        file = io.BytesIO()
        (image or Image.new("RGB", (40, 30), (200, 30, 90))).save(file, kind, **options)
        return file.getvalue()

    return encode


@pytest.fixture
def part():
    """An image part: bytes become a data URL, text is taken as the URL itself."""

    def make(content, index=0):
        if isinstance(content, bytes):
            content = "data:image/png;base64," + base64.b64encode(content).decode()
        return ImagePart(content, f"messages[0].content[{index}].image_url")

    return make


@pytest.fixture
async def loader(mini):
    """Makes loaders of the miniature; they are closed after the test."""
    made = []

    def make(remote=None, **limits):
        made.append(ImageLoader(mini, ImagePolicy(**limits), remote))
        return made[-1]

    yield make
    for one in made:
        one.close()


class PictureHost:
    """An HTTP server on 127.0.0.1 that answers paths with raw bytes and notes what it was asked."""

    def __init__(self):
        self.answers = {}
        self.requests = []
        self.port = 0

    def add(self, path, body=b"", status=200, **headers):
        """Sets the answer of a path; `headers` replace those a complete answer has."""
        lines = {"content-length": str(len(body)), "connection": "close"}
        lines.update({name.replace("_", "-"): value for name, value in headers.items()})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.answers[path] = f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body
        return f"http://pictures.test:{self.port}{path}"

    async def handle(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            answer = self.answers[head.split(" ")[1]]
            if callable(answer):
                await answer(writer)
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()


@pytest.fixture
async def pictures():
    host = PictureHost()
    server = await asyncio.start_server(host.handle, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    yield host
    server.close()
