"""The player page of ``lingbot-world serve``: a world of the embedded model, walked through by keys in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

FPS = 16


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server in a process of its own."""
    command = [sys.executable, "-m", "lingbot_core", "serve", "--model", "tiny", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if found := re.match(r"ready: tiny on (\S+)", line):
                    yield found[1]
                    break
            else:
                pytest.fail("the server ended before it was ready")
        finally:
            server.terminate()


def test_a_world_of_the_server_plays_to_its_end_while_keys_steer_it(browser: Browser, address: str):
    context = browser.new_context()
    page = context.new_page()
    sent: list[str] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda frame: sent.append(str(frame))))
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.get_by_label("Seconds", exact=True).fill("6")
    page.get_by_role("button", name="Start").click()
    page.wait_for_function("() => document.querySelector('video').currentTime > 0.1", timeout=30_000)
    page.keyboard.down("l")

    expect(page.locator("#state")).to_have_text("done: 8 chunks, completed", timeout=30_000)
    page.wait_for_function("() => document.querySelector('video').ended", timeout=30_000)
    expect(page.locator("#frames")).to_have_text("93")
    expect(page.locator("#problem")).to_be_hidden()
    ranges, duration = page.evaluate(
        "() => { const video = document.querySelector('video'); return [video.buffered.length, video.duration]; }"
    )
    assert (ranges, duration) == (1, pytest.approx(93 / FPS, abs=1e-3))
    assert any('"velocity"' in frame for frame in sent)
    assert errors == []
    context.close()
