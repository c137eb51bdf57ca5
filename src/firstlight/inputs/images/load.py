"""Owns the way from the image parts of a request to prepared images, off the event loop.
It knows nothing of messages, tokens of text, or HTTP answers.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import blake3

from firstlight.inputs.images.data_url import SCHEME, data_url_bytes
from firstlight.inputs.images.decode import decode_image, open_image
from firstlight.inputs.images.fetch import RemoteImages
from firstlight.inputs.images.pixels import image_patches
from firstlight.inputs.images.policy import ImagePolicy, image_error
from firstlight.inputs.images.preprocess_settings import PreprocessSettings
from firstlight.inputs.images.sizes import ImagePlan, plan_image

# Pictures decoded at once; each may take several times its pixels in memory.
DECODERS = 2


class ImagePart(NamedTuple):
    """An image a client sent: its `url`, and where it stands, like
    messages[0].content[1].image_url.
    """

    url: str
    where: str


@dataclass(frozen=True)
class PreparedImage:
    """An image ready for the encoder. `width` and `height` are its original pixels.

    `patches` are uint8 [N, 3, patch, patch] of `plan.grid`; `digest` (BLAKE3, hex) names patches
    and grid, so equal digests mean equal features.
    """

    width: int
    height: int
    plan: ImagePlan
    digest: str
    patches: bytes


class _TokenBudget:
    """Image tokens a request may still take; asked before anything is decoded."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, num_tokens: int, where: str) -> None:
        with self._lock:
            self._taken += num_tokens
            if self._limit is not None and self._taken > self._limit:
                raise image_error(
                    where,
                    f"brings the images of this request to {self._taken} tokens, more than the "
                    f"{self._limit} that fit",
                    "context_length_exceeded",
                )


class ImageLoader:
    """Loads the images of requests under one policy; close() gives its threads back."""

    def __init__(
        self,
        settings: PreprocessSettings,
        policy: ImagePolicy,
        remote: RemoteImages | None = None,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._remote = remote or RemoteImages(policy)
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="image")

    async def load(self, parts: Sequence[ImagePart]) -> list[PreparedImage]:
        """Returns one prepared image a part, in order; parts of equal content share their patches.

        Raises RequestError for the first part that cannot be used, whatever the others hold.
        """
        limit = self._policy.max_images
        if len(parts) > limit:
            raise image_error(
                parts[limit].where,
                f"is image {limit + 1} of {len(parts)}; a request may have {limit}",
                "too_many_images",
            )
        budget = _TokenBudget(self._policy.max_tokens)
        first = {part.url: part for part in reversed(parts)}
        tasks = {u: asyncio.ensure_future(self._load(p, budget)) for u, p in first.items()}
        try:
            loaded = [await tasks[part.url] for part in parts]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        shared: dict[str, PreparedImage] = {}
        return [shared.setdefault(f"{i.digest} {i.width} {i.height}", i) for i in loaded]

    def close(self) -> None:
        """Ends the decoding threads once they are idle."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, part: ImagePart, budget: _TokenBudget) -> PreparedImage:
        data: bytes | None = None
        if part.url[: len(SCHEME)].lower() != SCHEME:
            data = await self._fetch(part)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._prepare, part, data, budget)

    async def _fetch(self, part: ImagePart) -> bytes:
        scheme = part.url.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise image_error(
                part.where, "must be a data: URL or an http(s) URL", "invalid_image_url"
            )
        if not self._policy.fetches:
            raise image_error(
                part.where,
                "is an http(s) URL, and this service fetches none; send a data: URL",
                "image_fetch_refused",
            )
        return await self._remote.fetch(part.url, part.where)

    def _prepare(self, part: ImagePart, data: bytes | None, budget: _TokenBudget) -> PreparedImage:
        if data is None:
            data = data_url_bytes(part.url, self._policy, part.where)
        image = open_image(data, self._policy, part.where)
        plan = plan_image(*image.size, self._settings)
        budget.take(plan.num_tokens, part.where)
        patches = image_patches(decode_image(image, part.where), plan, self._settings)
        return PreparedImage(*image.size, plan, _digest(plan, patches), patches)


def _digest(plan: ImagePlan, patches: bytes) -> str:
    grid = b"".join(side.to_bytes(4, "little") for side in plan.grid)
    return blake3.blake3(grid).update(patches).hexdigest()
