"""Tests of what a person sees: Debian's Chromium, headless, on ComfyUI's real front end.

Two servers are behind it. ``stub`` is the newest front-end package with a small stand-in, for all that happens in the
page. ``server`` is a running ComfyUI of .venv-comfy. Nothing but the loopback is ever asked. Screenshots are left in
outputs/screenshots.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import node_info
import pytest
from comfy_page import FLAGS, ComfyPage, find_chromium
from comfy_server import ComfyServer, make_server
from front_stub import FrontStub
from playwright.sync_api import Browser, Route, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "outputs" / "screenshots"
RENDERERS = {"canvas": False, "vue": True}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def object_info() -> dict[str, object]:
    """The nodes of the pack and the core nodes of its workflows; tests/comfy compares the file with a real server's."""
    return node_info.load()


@pytest.fixture(scope="session")
def stub(object_info) -> Iterator[FrontStub]:
    with FrontStub(object_info) as running:
        yield running


@pytest.fixture(scope="session")
def server() -> Iterator[ComfyServer]:
    """A running ComfyUI in its own environment, without other packs' scripts in the page."""
    python = os.environ.get("COMFY_PYTHON") or str(ROOT / ".venv-comfy" / "bin" / "python")
    with make_server(python, helper_suite=False) as running:
        yield running


@pytest.fixture(params=list(RENDERERS))
def renderer(request: pytest.FixtureRequest) -> str:
    """Both ways in which the front end draws nodes."""
    return request.param


@pytest.fixture
def open_page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[object]:
    """``open_page(url, renderer)`` opens the editor in a fresh profile and waits until it is ready."""
    contexts = []

    def open_at(url: str, renderer: str = "canvas", locale: str = "en") -> ComfyPage:
        context = browser.new_context(viewport={"width": 1600, "height": 900}, accept_downloads=True)
        contexts.append(context)
        context.route("**/*", _only_loopback)
        page = ComfyPage(context.new_page(), url)
        page.prepare({"Comfy.VueNodes.Enabled": RENDERERS[renderer], "Comfy.Locale": locale})
        page.open()
        return page

    yield open_at
    for context in contexts:
        context.close()


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> object:
    """``screenshot(page, name)`` keeps a picture for people to look at."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)

    def take(page: ComfyPage, name: str = "") -> Path:
        test = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
        path = SCREENSHOTS / f"{name or test}.png"
        page.page.screenshot(path=path)
        return path

    return take


def _only_loopback(route: Route) -> None:
    host = urlsplit(route.request.url).hostname
    if host in ("127.0.0.1", "localhost"):
        route.continue_()
    else:
        route.abort()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Shows what the server wrote under a test that failed with it."""
    report = yield
    for name in ("server", "stub"):
        running = getattr(item, "funcargs", {}).get(name)
        if report.failed and running is not None:
            report.sections.append((f"log of the {name}", running.log()))
    return report


def _chromium() -> str:
    try:
        return find_chromium()
    except FileNotFoundError as error:
        raise pytest.UsageError(f"tests/browser: {error}") from None
