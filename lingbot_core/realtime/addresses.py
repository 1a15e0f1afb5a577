"""Which network addresses a stranger's URL may make us connect to: public ones, and nothing else.

A name is looked up once and the connection goes to the very addresses that were checked, so that a second answer of the
name server cannot lead elsewhere.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from .errors import MessageError

_TRANSLATED = IPv6Network("64:ff9b::/96")  # NAT64 (RFC 6052): the last 32 bits are the IPv4 address that is meant


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, as does every IPv4 address that hides in an IPv6 one.

    False for private, loopback, link-local, multicast, reserved and unspecified ones, and for what is no IP address.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return all(_is_public(one) for one in (parsed, *_inside(parsed)))


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and (address.is_site_local or address.scope_id is not None):
        return False
    # These two stand for the IPv4 address inside and are judged by it; Python versions differ on the outside.
    if isinstance(address, IPv6Address) and (address.ipv4_mapped is not None or address in _TRANSLATED):
        return True
    special = address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local
    return address.is_global and not (special or address.is_private or address.is_unspecified)


def _inside(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour]
    if address in _TRANSLATED:
        found.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [one for one in found if one is not None]


def check_address(address: str, host: str) -> None:
    """Raises MessageError unless ``address``, which ``host`` leads to, is public."""
    if not is_public(address):
        raise MessageError(f"the URL's host {host[:100]!r} leads to an address that is not public; it is not asked")


class PublicResolver(AbstractResolver):
    """Looks names up for aiohttp and refuses a name as soon as one of its addresses is not public."""

    def __init__(self) -> None:
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The checked addresses of ``host``. Raises MessageError, and OSError for a name that is not known."""
        found = await self._inner.resolve(host, port, family)
        for result in found:
            check_address(result["host"], host)
        return found

    async def close(self) -> None:
        """Nothing is held."""
        await self._inner.close()
