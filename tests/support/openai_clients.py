"""OpenAI's own clients of a server in a test: no proxy in between, and nothing asked twice."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import openai


@contextmanager
def openai_client(url: str, **options: Any) -> Iterator[openai.OpenAI]:
    """A client of the server at `url` until the block ends."""
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=url + "/v1", api_key="none", http_client=http, max_retries=0, **options
        ) as client,
    ):
        yield client


@asynccontextmanager
async def async_openai_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous one."""
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        openai.AsyncOpenAI(
            base_url=url + "/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
    ):
        yield client
