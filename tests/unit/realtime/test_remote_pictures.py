"""Pictures behind URLs, from a real server on this machine: types, sizes, redirects, addresses, time."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable

import cv2
import numpy as np
import pytest
from aiohttp import web

from lingbot_core.realtime import addresses
from lingbot_core.realtime.addresses import is_public
from lingbot_core.realtime.codec import Limits
from lingbot_core.realtime.errors import MessageError
from lingbot_core.realtime.pictures import load_picture

PICTURE = np.random.default_rng(4).integers(0, 256, (24, 40, 3), dtype=np.uint8)
PNG = cv2.imencode(".png", PICTURE[..., ::-1])[1].tobytes()
LIMITS = Limits(url_seconds=5.0)


class Site:
    """A server at 127.0.0.1 that counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        self.headers.append(dict(request.headers))
        name, _, rest = request.path.strip("/").partition("/")
        match name:
            case "picture":
                return web.Response(body=PNG, content_type=f"image/{rest}")
            case "text":
                return web.Response(body=PNG, content_type="text/html")
            case "lie":
                return web.Response(body=b"<html>", content_type="image/png")
            case "status":
                return web.Response(status=int(rest), body=PNG, content_type="image/png")
            case "hops":
                left = int(rest)
                raise web.HTTPFound("/picture/png" if left == 1 else f"/hops/{left - 1}")
            case "to":
                return web.Response(status=307, headers={"Location": request.query["url"]})
            case "nowhere":
                return web.Response(status=302)
            case "zipped":
                head = {"Content-Encoding": "gzip"}
                return web.Response(body=gzip.compress(bytes(50 << 20)), content_type="image/png", headers=head)
            case "cookie":
                found = web.HTTPFound("/picture/png")
                found.set_cookie("who", "me")
                raise found
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        if name == "claims":
            response.content_length = 1 << 40
        await response.prepare(request)
        try:
            if name == "endless":
                while True:
                    await response.write(bytes(64 << 10))
            while True:  # "slow" and "claims": a few bytes at a time, until nobody listens
                await response.write(b"\x89")
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        return response


def visit(what: Callable[[Site], Awaitable[object]]) -> tuple[object, Site]:
    """Runs ``what`` while the site is up."""

    async def run() -> tuple[object, Site]:
        site = Site()
        app = web.Application()
        app.router.add_get("/{tail:.*}", site.answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        server = web.TCPSite(runner, "127.0.0.1", 0)
        await server.start()
        site.port = runner.addresses[0][1]
        try:
            return await what(site), site
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def load(path: str, limits: Limits = LIMITS) -> tuple[object, Site]:
    return visit(lambda site: load_picture(f"http://127.0.0.1:{site.port}{path}", limits, allow_urls=True))


def refusal(path: str, limits: Limits = LIMITS) -> tuple[str, Site]:
    async def fail(site: Site) -> str:
        with pytest.raises(MessageError) as caught:
            await load_picture(f"http://127.0.0.1:{site.port}{path}", limits, allow_urls=True)
        assert caught.value.code == "malformed_payload"
        return str(caught.value)

    return visit(fail)


@pytest.fixture
def at_home(monkeypatch):
    """Takes 127.0.0.1, and nothing else, for a public address."""
    monkeypatch.setattr(addresses, "is_public", lambda address: address == "127.0.0.1")


@pytest.fixture
def names(monkeypatch):
    """A name server: the answers that a name gives one after the other, and how often it was asked."""
    answers: dict[str, list[str]] = {}
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *args: object, **options: object) -> list[tuple]:
        asked.append(host)
        if not answers.get(host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = answers[host].pop(0)
        kinds = {4: socket.AF_INET, 6: socket.AF_INET6}
        return [
            (
                kinds[ipaddress.ip_address(one).version],
                socket.SOCK_STREAM,
                6,
                "",
                (one, port, 0, 0)[: 4 if ":" in one else 2],
            )
            for one in found.split()
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return answers, asked


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("127.0.0.1", False),
        ("127.8.9.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.0.2.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("239.255.255.250", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::", False),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("2606:4700:4700::1111%1", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("2001:db8::1", False),
        ("127.1", False),
        ("2130706433", False),
        ("0x7f000001", False),
        ("localhost", False),
        ("", False),
    ],
)  # fmt: skip
def test_which_addresses_are_public(address, public):
    assert is_public(address) is public


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/picture/png",
        "http://localhost:{port}/picture/png",
        "http://127.1:{port}/picture/png",
        "http://2130706433:{port}/picture/png",
        "http://0x7f000001:{port}/picture/png",
        "http://0177.0.0.1:{port}/picture/png",
        "http://127.0.0.1.:{port}/picture/png",
        "http://0.0.0.0:{port}/picture/png",
        "http://[::ffff:127.0.0.1]:{port}/picture/png",
        "http://[::1]:{port}/picture/png",
        "http://169.254.169.254/latest/meta-data",
    ],
)
def test_this_machine_and_its_network_are_never_asked(url):
    async def fail(site: Site) -> str:
        with pytest.raises(MessageError) as caught:
            await load_picture(url.format(port=site.port), LIMITS, allow_urls=True)
        return str(caught.value)

    text, site = visit(fail)
    # Some of these spellings are no host at all for some versions of the libraries.
    assert "an address that is not public" in text or "is no URL" in text or "cannot be read" in text
    assert site.asked == []


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_a_picture_is_fetched(at_home, kind):
    got, site = load(f"/picture/{kind}?a=1&b=%20")
    np.testing.assert_array_equal(got, PICTURE)
    assert site.asked == [f"/picture/{kind}?a=1&b=%20"]
    assert site.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/text", "its URL is of the type 'text/html'; use one of image/png, image/jpeg, image/webp"),
        ("/picture/gif", "its URL is of the type 'image/gif'"),
        ("/picture/svg+xml", "its URL is of the type 'image/svg+xml'"),
        ("/lie", "in no known format"),
        ("/status/404", "answers with status 404"),
        ("/status/206", "answers with status 206"),
        ("/nowhere", "redirects to nowhere"),
        ("/zipped", "sends compressed data"),
        ("/claims", "has more than 33554432 bytes"),
        ("/to?url=ftp://example.com/a", "'ftp://example.com/a' is no http or https URL"),
        ("/to?url=file:///etc/hostname", "is no http or https URL"),
        ("/to?url=http://user:secret@127.0.0.1/", "a user name or a password"),
        ("/to?url=http://127.0.0.9/", "'127.0.0.9' leads to an address that is not public"),
        ("/to?url=//10.0.0.1/a", "'10.0.0.1' leads to an address that is not public"),
        ("/to?url=http://[::1]/", "leads to an address that is not public"),
    ],
)
def test_what_is_no_picture_is_refused(at_home, path, reason):
    text, site = refusal(path)
    assert reason in text
    assert len(site.asked) == 1


def test_three_redirects_are_followed_and_no_more(at_home):
    got, site = load("/hops/3")
    np.testing.assert_array_equal(got, PICTURE)
    assert len(site.asked) == 4
    text, site = refusal("/hops/4")
    assert "redirects more than 3 times" in text
    assert site.asked == ["/hops/4", "/hops/3", "/hops/2", "/hops/1"]


def test_cookies_are_not_kept(at_home, names):
    answers, _ = names
    answers["cookies.example"] = ["127.0.0.1", "127.0.0.1"]
    _, site = visit(lambda site: load_picture(f"http://cookies.example:{site.port}/cookie", LIMITS, allow_urls=True))
    assert site.asked == ["/cookie", "/picture/png"]
    assert "Cookie" not in site.headers[1]


def test_reading_stops_at_the_limit(at_home):
    before = time.monotonic()
    text, _ = refusal("/endless", Limits(picture_bytes=1 << 20))
    assert "has more than 1048576 bytes" in text
    assert time.monotonic() - before < 10
    got, _ = load("/picture/png", Limits(picture_bytes=len(PNG)))
    np.testing.assert_array_equal(got, PICTURE)


def test_slow_servers_are_left(at_home):
    before = time.monotonic()
    text, _ = refusal("/slow", Limits(url_seconds=0.5))
    assert "gave no picture within 0.5 s" in text
    assert time.monotonic() - before < 5


def test_the_connection_goes_to_the_address_that_was_checked(at_home, names):
    answers, asked = names
    answers["rebinding.example"] = ["127.0.0.1", "10.0.0.1"]
    got, site = visit(
        lambda site: load_picture(f"http://rebinding.example:{site.port}/picture/png", LIMITS, allow_urls=True)
    )
    np.testing.assert_array_equal(got, PICTURE)
    assert asked == ["rebinding.example"]
    assert site.headers[0]["Host"] == f"rebinding.example:{site.port}"


def test_a_redirect_looks_its_name_up_and_checks_it_again(at_home, names):
    answers, asked = names
    answers["rebinding.example"] = ["127.0.0.1", "10.0.0.1"]

    async def fail(site: Site) -> str:
        with pytest.raises(MessageError) as caught:
            await load_picture(f"http://rebinding.example:{site.port}/hops/1", LIMITS, allow_urls=True)
        return str(caught.value)

    text, site = visit(fail)
    assert "'rebinding.example' leads to an address that is not public" in text
    assert asked == ["rebinding.example"] * 2
    assert site.asked == ["/hops/1"]


@pytest.mark.parametrize("found", ["10.0.0.1", "127.0.0.1 10.0.0.1", "fe80::1", "::1", "127.0.0.1 ::ffff:10.0.0.1"])
def test_a_name_with_any_address_that_is_not_public_is_refused(at_home, names, found):
    answers, _ = names
    answers["inside.example"] = [found]

    async def fail(site: Site) -> str:
        with pytest.raises(MessageError) as caught:
            await load_picture(f"http://inside.example:{site.port}/picture/png", LIMITS, allow_urls=True)
        return str(caught.value)

    text, site = visit(fail)
    assert "'inside.example' leads to an address that is not public" in text
    assert site.asked == []


def test_a_redirect_to_a_name_inside_is_refused(at_home, names):
    answers, _ = names
    answers["inside.example"] = ["192.168.0.1"]
    text, site = refusal("/to?url=http://inside.example/")
    assert "'inside.example' leads to an address that is not public" in text
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "is no"),
        ("http:///a.png", "is no"),
        ("http://:80/a.png", "is no"),
        ("http://[::1/a.png", "is no URL"),
        ("http://example.com:99999/a.png", "is no URL"),
        ("http://example.com:abc/a.png", "is no URL"),
        ("http://example.com:0/a.png", "is no http or https URL"),
        ("http://me@example.com/a.png", "a user name or a password"),
        ("http://" + "a" * 5000 + ".com/", "its URL"),
        ("http://unknown.example/a.png", "its URL cannot be read"),
        ("http://exa mple.com/", "its URL|is no"),
        ("http://\u2028.com/", "its URL|is no"),
        ("http://\ud83d.com/", "its URL|is no"),
        ("http://127.0.0.1:1/a.png", "its URL cannot be read"),
    ],
)
def test_urls_that_lead_nowhere_are_refused(at_home, names, url, reason):
    with pytest.raises(MessageError, match="^image.*(" + reason + ")"):
        asyncio.run(load_picture(url, LIMITS, allow_urls=True))
