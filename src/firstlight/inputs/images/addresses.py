"""Owns which network addresses a service may connect to on a client's word, and finding them.
It knows nothing of HTTP or images.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

Resolver = Callable[[str, int], Awaitable[list[str]]]
AddressCheck = Callable[[str], bool]

# Translators of IPv6-only networks carry the IPv4 address in the last four bytes (RFC 6052).
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


async def resolve_host(host: str, port: int) -> list[str]:
    """Returns every address of a host, in the order the system prefers. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(f"{host} is no host name") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public_address(text: str) -> bool:
    """Says whether an address is one of the open internet.

    Private, loopback, link-local, multicast and reserved ones are not, nor are IPv6 addresses that
    lead to such an IPv4 address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.sixtofour is not None or address.teredo is not None:
            return False
        inner = address.ipv4_mapped
        if address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            address = inner
        elif address.is_site_local or int(address) >> 96 == 0:  # deprecated forms
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved
