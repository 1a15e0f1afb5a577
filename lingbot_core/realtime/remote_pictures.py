"""Downloads the picture that a message names by a URL; only where a server was started to do so.

Whoever sends the URL may be a stranger who wants to reach what only we can reach, or to keep us busy: see
addresses.py, and the limits here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import aiohttp
from yarl import URL

from .addresses import PublicResolver, check_address
from .errors import MessageError
from .limits import DEFAULT_LIMITS, Limits

_REDIRECTS = (301, 302, 303, 307, 308)
_BLOCK = 64 << 10


async def fetch_picture(
    url: str, media_types: Collection[str], limits: Limits = DEFAULT_LIMITS, name: str = "image"
) -> bytes:
    """The bytes behind an http or https URL, undecoded.

    media_types: what the server may call them. At most ``limits.picture_bytes`` are read, for at most
    ``limits.url_seconds``, over at most ``limits.redirects`` redirects, each checked like the first URL. Addresses that
    are not public are not asked, no proxy and no cookies are used. Raises MessageError.
    """
    timeout = aiohttp.ClientTimeout(total=limits.url_seconds, sock_connect=limits.url_seconds / 3)
    try:
        async with (
            asyncio.timeout(limits.url_seconds),  # over all redirects; aiohttp counts each request anew
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": ", ".join(media_types), "Accept-Encoding": "identity"},
                auto_decompress=False,
                timeout=timeout,
            ) as session,
        ):
            return await _follow(session, _checked_url(url, name), media_types, limits, name)
    except TimeoutError as error:
        raise MessageError(
            f"{name}: its URL gave no picture within {limits.url_seconds:g} s; send the picture's bytes"
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host name that cannot be written
        reason = type(error).__name__
        raise MessageError(f"{name}: its URL cannot be read ({reason}); send the picture's bytes") from error


async def _follow(
    session: aiohttp.ClientSession, url: URL, media_types: Collection[str], limits: Limits, name: str
) -> bytes:
    for _ in range(limits.redirects + 1):
        async with session.get(url, allow_redirects=False) as response:
            if response.status not in _REDIRECTS:
                return await _read(response, media_types, limits, name)
            location = response.headers.get("Location")
            if not location:
                raise MessageError(f"{name}: its URL redirects to nowhere; use the picture's own URL")
            url = _checked_url(location, name, base=url)
    raise MessageError(f"{name}: its URL redirects more than {limits.redirects} times; use the picture's own URL")


async def _read(response: aiohttp.ClientResponse, media_types: Collection[str], limits: Limits, name: str) -> bytes:
    if response.status != 200:
        raise MessageError(f"{name}: the server of its URL answers with status {response.status}; check the URL")
    if response.content_type.lower() not in media_types:
        raise MessageError(
            f"{name}: its URL is of the type {response.content_type[:60]!r}; use one of {', '.join(media_types)}"
        )
    if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise MessageError(f"{name}: its URL sends compressed data, which could unpack to anything; use another server")
    too_long = MessageError(f"{name}: its URL has more than {limits.picture_bytes} bytes; use a smaller picture")
    if (response.content_length or 0) > limits.picture_bytes:
        raise too_long
    data = bytearray()
    async for block in response.content.iter_chunked(_BLOCK):
        if len(data) + len(block) > limits.picture_bytes:
            raise too_long
        data += block
    return bytes(data)


def _checked_url(text: str, name: str, base: URL | None = None) -> URL:
    """The URL, absolute; its host is checked here if it is an IP address, else when it is looked up."""
    try:
        url = URL(text) if base is None else base.join(URL(text))
        host = url.host or ""
        named_port = url.port  # raises ValueError for one that is no number
    except ValueError as error:
        raise MessageError(f"{name}: {text[:100]!r} is no URL") from error
    if url.scheme not in ("http", "https") or not host or not named_port:
        raise MessageError(f"{name}: {text[:100]!r} is no http or https URL with a host")
    if url.user is not None or url.password is not None:
        raise MessageError(f"{name}: its URL holds a user name or a password; use one without")
    if ":" in host or host.replace(".", "").isdigit():  # an IP address, or nearly one: aiohttp asks no resolver then
        check_address(host, host)
    return url
