"""Owns fetching an image from an http(s) address without being led to where it must not go.
It knows nothing of pixels; what may be fetched is said by the policy.

A name is resolved once, every address it has is checked, and the connection goes to a checked
address itself, so that a second answer of the name server cannot redirect it.
"""

import asyncio
import ssl
from typing import NamedTuple

import httpx

from firstlight.inputs.images.addresses import (
    AddressCheck,
    Resolver,
    is_public_address,
    resolve_host,
)
from firstlight.inputs.images.policy import ImagePolicy, image_error, too_many_bytes

MAX_URL = 8192
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "firstlight"}
_FAILED = "image_fetch_failed"
_REFUSED = "image_fetch_refused"


class _Redirect(NamedTuple):
    location: str


class RemoteImages:
    """Fetches images for one service; `may_connect` judges each address a name resolves to."""

    def __init__(
        self,
        policy: ImagePolicy,
        *,
        resolve: Resolver = resolve_host,
        may_connect: AddressCheck = is_public_address,
        certificates: ssl.SSLContext | None = None,
    ) -> None:
        self._policy = policy
        self._resolve = resolve
        self._may_connect = may_connect
        self._certificates = certificates

    async def fetch(self, url: str, where: str) -> bytes:
        """Returns the bytes behind an address. Raises RequestError naming the part and the reason.

        Environment variables that name proxies are not followed, and no cookie is kept.
        """
        seconds = self._policy.fetch_seconds
        try:
            return await asyncio.wait_for(self._follow(url, where), seconds)
        except asyncio.TimeoutError:
            raise image_error(where, f"did not arrive within {seconds:g} s", _FAILED) from None

    async def _follow(self, url: str, where: str) -> bytes:
        target = self._checked(url, where)
        for _ in range(self._policy.max_redirects + 1):
            found = await self._get(target, where)
            if isinstance(found, bytes):
                return found
            target = self._next(target, found, where)
        raise image_error(
            where, f"was redirected more than {self._policy.max_redirects} times", _REFUSED
        )

    def _next(self, source: httpx.URL, redirect: _Redirect, where: str) -> httpx.URL:
        try:
            target = source.join(redirect.location)
        except (httpx.InvalidURL, ValueError):
            raise image_error(where, "was redirected to no URL", _FAILED) from None
        if source.scheme == "https" and target.scheme == "http":
            raise image_error(where, "was redirected from https to http", _REFUSED)
        return self._checked(str(target), where)

    def _checked(self, text: str, where: str) -> httpx.URL:
        """The URL, if its form and its host are among those allowed."""
        try:
            url = httpx.URL(text) if len(text) <= MAX_URL else httpx.URL()
        except (httpx.InvalidURL, ValueError):
            url = httpx.URL()
        if url.scheme not in _PORTS or not url.host:
            raise image_error(where, "is no http or https URL", "invalid_image_url")
        if url.userinfo:
            raise image_error(where, "must not carry a user name or password", _REFUSED)
        if not self._policy.allows(_host(url), _port(url), usual_port=_PORTS[url.scheme]):
            raise image_error(
                where, f"{_shown(url)} is not among the hosts images are fetched from", _REFUSED
            )
        return url

    async def _get(self, url: httpx.URL, where: str) -> bytes | _Redirect:
        """Asks the first address of the host that answers."""
        problem: httpx.HTTPError | None = None
        for address in await self._addresses(url, where):
            try:
                return await self._ask(url, address, where)
            except httpx.ConnectError as error:
                problem = error
            except httpx.HTTPError as error:
                problem = error
                break
        reason = f": {type(problem).__name__}" if problem is not None else ""
        raise image_error(where, f"could not be fetched{reason}", _FAILED) from problem

    async def _addresses(self, url: httpx.URL, where: str) -> list[str]:
        try:
            found = await self._resolve(_host(url), _port(url))
        except OSError:
            raise image_error(where, f"host {_shown(url)} is not known", _FAILED) from None
        if not all(self._may_connect(address) for address in found):
            raise image_error(
                where, "host has an address that is not of the open internet", _REFUSED
            )
        return found

    async def _ask(self, url: httpx.URL, address: str, where: str) -> bytes | _Redirect:
        """One request to one address; the name still goes into the headers and the handshake."""
        client = httpx.AsyncClient(
            verify=self._trusted() if url.scheme == "https" else False,
            trust_env=False,
            follow_redirects=False,
            timeout=self._policy.fetch_seconds,
        )
        async with client:
            request = client.build_request(
                "GET",
                url.copy_with(host=address, fragment=None),
                headers={**_HEADERS, "Host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": _host(url)},
            )
            response = await client.send(request, stream=True)
            try:
                return await self._read(response, where)
            finally:
                await response.aclose()

    async def _read(self, response: httpx.Response, where: str) -> bytes | _Redirect:
        if response.has_redirect_location:
            return _Redirect(response.headers["location"])
        if response.status_code != 200:
            raise image_error(where, f"was answered with status {response.status_code}", _FAILED)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise image_error(where, "was sent compressed, which was not asked for", _FAILED)
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._policy.max_bytes:
            raise too_many_bytes(self._policy, where)
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > self._policy.max_bytes:
                raise too_many_bytes(self._policy, where)
        return bytes(data)

    def _trusted(self) -> ssl.SSLContext:
        if self._certificates is None:
            self._certificates = httpx.create_ssl_context(trust_env=False)
        return self._certificates


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _port(url: httpx.URL) -> int:
    return url.port or _PORTS[url.scheme]


def _shown(url: httpx.URL) -> str:
    return repr(url.netloc.decode("ascii")[:100])
